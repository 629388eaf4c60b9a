"""Classes of tests and benchmarks that stand for an internal protocol have all of its members, with its parameters.

A class with three methods of a protocol is taken for a double of it. The part of `AsyncLLM` that the server uses counts
as a protocol. Classes that inherit from a class of the product
have its members.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT, DOUBLES = ("engine/src", "server/src", "operator/src"), ("benchmarks", "tests", "e2e")
LEAST = 3
#: Doubles that lack members -> the reason.
PARTIAL = {
    "Memory": "the memory of one rank, which runs no plans",
    "DecodeExecutor": "a benchmark of decode steps swaps nothing, has no adapters and never sleeps",
    "Journal": "the runner under test allocates no cache and attends to nothing",
    "Blocks": "a cache under test moves blocks and attends to nothing",
}
SERVED = "AsyncLLM"
#: A member of `AsyncLLM` that the server uses.
USE = re.compile(r"\bclient\.([a-z]\w*)")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Members = Mapping[str, Function | None]  # None: an attribute or a property


def texts(*folders: str) -> list[str]:
    return [path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def classes(text: str) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))


def base_names(node: ast.ClassDef) -> list[str]:
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [base.id for base in bases if isinstance(base, ast.Name)]


def members(node: ast.ClassDef) -> Members:
    found: dict[str, Function | None] = {}
    for part in ast.walk(node):
        match part:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                found[name] = None
    for part in node.body:
        match part:
            case ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                found[name] = None
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found[part.name] = None if part.decorator_list else part
    return found


def methods(found: Members) -> set[str]:
    return {name for name, function in found.items() if function is not None}


def faults(double: Members, protocol: Members) -> Iterator[str]:
    if "__getattr__" not in double:
        yield from (f"{name} is missing" for name in protocol if name not in double)
    for name in methods(protocol) & methods(double):
        wanted, own = protocol[name].args, double[name].args
        positional = [argument.arg for argument in wanted.args]
        takes = [argument.arg for argument in own.args]
        by_name = {argument.arg for argument in wanted.kwonlyargs}
        takes_by_name = {argument.arg for argument in own.kwonlyargs} | {*takes[len(positional) :]}
        required = {a.arg for a, default in zip(own.kwonlyargs, own.kw_defaults, strict=True) if default is None}
        if takes[: len(positional)] != positional and own.vararg is None:
            yield f"{name} has the parameters {takes}, not {positional}"
        elif by_name - takes_by_name and own.kwarg is None:
            yield f"{name} lacks the parameters {by_name - takes_by_name}"
        elif required - by_name or len(takes) - len(own.defaults) > len(positional):
            yield f"{name} requires more parameters"


class Doubles:
    """The classes of tests and benchmarks that may be doubles. `product`: names of the product's classes."""

    def __init__(self, product: set[str], protocols: Mapping[str, Members]) -> None:
        self.product = product
        names = "|".join(sorted({name for protocol in protocols.values() for name in methods(protocol)}))
        method = re.compile(rf"def ({names})\(")
        self.nodes = [node for text in texts(*DOUBLES) if method.search(text) for node in classes(text)]
        self._by_name = {node.name: node for node in self.nodes}

    def lineage(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """Return a class after its base classes in tests and benchmarks."""
        bases = [self._by_name[name] for name in base_names(node) if name in self._by_name and name != node.name]
        return [*(older for base in bases for older in self.lineage(base)), node]

    def inherits_from_product(self, node: ast.ClassDef) -> bool:
        return any(name in self.product for older in self.lineage(node) for name in base_names(older))

    def members(self, node: ast.ClassDef) -> Members:
        return {name: value for older in self.lineage(node) for name, value in members(older).items()}


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str, list[str]]]:
    """Each double, its protocol, and its faults."""
    product = texts(*PRODUCT)
    names = {name for text in product for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    nodes = [node for text in product if "Protocol)" in text for node in classes(text)]
    protocols = {node.name: members(node) for node in nodes if "Protocol" in base_names(node)}
    used = {name for text in texts("server/src/octavo_server/api") for name in USE.findall(text)}
    engine = next(
        node for text in product if f"class {SERVED}:" in text for node in classes(text) if node.name == SERVED
    )
    protocols[SERVED] = {name: member for name, member in members(engine).items() if name in used}
    doubles = Doubles(names - protocols.keys() | {SERVED}, protocols)
    return [
        (node.name, protocol, [*faults(own, wanted)])
        for node in doubles.nodes
        if not doubles.inherits_from_product(node)
        for own in (doubles.members(node),)
        for protocol, wanted in protocols.items()
        if len(methods(own) & methods(wanted)) >= LEAST
    ]


def test_doubles_have_the_members_of_their_protocol(found):
    wrong = [f"{double} stands for {protocol}: {fault}" for double, protocol, all in found for fault in all]
    assert [line for line in wrong if line.split()[0] not in PARTIAL or "missing" not in line] == []


def test_doubles_are_found(found):
    pairs = {(double, protocol) for double, protocol, _ in found}
    expected = {("PacedExecutor", "Executor"), ("ScriptedExecutor", "Executor"), ("ScriptedClient", SERVED)}
    assert expected <= pairs
    assert {*PARTIAL} <= {double for double, _, faults in found if faults}
