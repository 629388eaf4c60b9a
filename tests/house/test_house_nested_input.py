"""Text of others may be nested more deeply than Python's stack allows: each parser's RecursionError is handled."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for name in ("engine", "server", "operator") for path in (ROOT / name / "src").rglob("*.py"))
PARSERS = {
    *("json.load", "json.loads", "yaml.safe_load", "yaml.safe_load_all"),
    *("msgspec.json.decode", "msgspec.msgpack.decode"),
}
WORDS = ("json.load", "yaml.safe_load", "json.decode", "msgpack.decode", "Decoder(")
#: File and function -> why its text is never nested deeply, or who handles the error.
TRUSTED = {
    ("octavo_engine/core/replay.py", "_decide"): "json.dumps has written it",
    ("octavo_engine/grammar/source.py", "_write"): "json.dumps has written it, within the limit of depth",
    ("octavo_engine/grammar/source.py", "_grammars"): "json.dumps has written it, within the limit of depth",
    ("octavo_engine/media/processor.py", "process"): "the front end has encoded it",
    ("octavo_engine/media/worker.py", "main"): "the engine core has encoded it",
    ("octavo_engine/process/messages.py", "refusal"): "the front end has encoded it",
    ("octavo_engine/text/split_points.py", "from_tokenizer"): "tokenizers has parsed it, which limits its depth",
    ("octavo_engine/text/token_bytes.py", "_decoder_steps"): "tokenizers has written it",
    ("octavo_server/cli/route.py", "read_worker_config"): "the supervisor has written it",
    ("octavo_server/client/chunks.py", "decode_chunk"): "its callers handle the error",
    ("octavo_server/kv/card.py", "read_card"): "the router's `_fetch_with_retries` handles the error",
    ("octavo_server/router/fleet/discovery/kubernetes.py", "_follow"): "the API server limits the depth",
    ("octavo_server/router/fleet/discovery/kubernetes.py", "_apply_event"): "the API server limits the depth",
    ("octavo_server/router/fleet/discovery/kubernetes.py", "_check"): "the API server limits the depth",
    ("octavo_server/router/observe/workers.py", "_query_other"): "another worker of the router has encoded it",
    ("octavo_server/router/observe/workers.py", "_serve"): "another worker of the router has encoded it",
    ("octavo_operator/explain/cluster_reader.py", "_call_service"): "the API server limits the depth",
    ("octavo_operator/explain/cluster_reader.py", "_get"): "the API server limits the depth",
}


def parsers_of(tree: ast.Module) -> set[str]:
    """The names that call a parser in this module: `PARSERS`, and the decoders that it makes."""
    made = set()
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None and "Decoder(" in ast.unparse(value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made |= {name for target in targets for name in (ast.unparse(target), f"{ast.unparse(target)}.decode")}
    return PARSERS | made


def unhandled(node: ast.AST, names: set[str], function: str = "") -> Iterator[str]:
    """Yield the function of each use of a parser that no `except RecursionError` surrounds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if function and isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names:
        yield function
        return
    for child in ast.iter_child_nodes(node):
        handles = isinstance(node, ast.Try) and child in node.body
        caught = [ast.unparse(handler.type) for handler in node.handlers] if handles else []
        if not any("RecursionError" in each for each in caught):
            yield from unhandled(child, names, function)


def sites() -> set[tuple[str, str]]:
    found = set()
    for path in SOURCES:
        text = path.read_text()
        if not any(word in text for word in WORDS):
            continue
        tree = ast.parse(text)
        name = str(path.relative_to(next(p for p in path.parents if p.name == "src")))
        found |= {(name, function) for function in unhandled(tree, parsers_of(tree))}
    return found


def test_each_parser_of_foreign_text_handles_too_deep_nesting() -> None:
    assert sites() == set(TRUSTED)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(text):\n    return json.loads(text)", ["f"]),
        ("def f(text):\n    try:\n        return json.loads(text)\n    except ValueError:\n        pass", ["f"]),
        (
            "def f(x):\n    try:\n        g(json.loads, x)\n    except (ValueError, RecursionError):\n        ...",
            [],
        ),
        ("_read = Decoder(int).decode\ndef f(text):\n    return _read(text)", ["f"]),
    ],
)
def test_unhandled_parsers_are_found(code: str, found: list[str]) -> None:
    tree = ast.parse(code)
    assert list(unhandled(tree, parsers_of(tree))) == found
