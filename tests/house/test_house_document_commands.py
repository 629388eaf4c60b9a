"""Every command in a code block of README, CONTRIBUTING and docs/ would be accepted: it is parsed, and not run.

`octavo` commands go through the real parsers. Targets, files, charts, chart values and package extras exist. JSON in
`curl` and YAML manifests are valid, and Python compiles. A program without a check below is an error.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import octavo_engine
import pytest
import yaml
from octavo_operator.spec.service import KIND, read_spec
from octavo_server.cli.main import COMMANDS, build_parser
from octavo_testing.printed_blocks import ROOT, logical_lines, printed_blocks

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = printed_blocks(DOCUMENTS)
INLINE = re.compile(r"`(?:\.venv/bin/)?octavo ([a-z-]+)")
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
OPERATORS = frozenset({"|", "||", "&", "&&", ";"})
REDIRECTIONS = frozenset({"<", ">", ">>"})
KUBECTL = frozenset(
    {"apply", "create", "delete", "describe", "exec", "explain", "get", "logs", "port-forward", "proxy"}
)
KUBECTL |= {"scale", "wait"}
#: Programs whose arguments are not checked.
UNCHECKED = frozenset({"apt-get", "base64", "git", "jq", "openssl"})


def blocks(languages: set[str]) -> list[Any]:
    return [pytest.param(block.body, id=str(block)) for block in BLOCKS if block.language in languages]


def commands(line: str) -> Iterator[list[str]]:
    """The words of each simple command, also of those in `$(...)`."""
    for inner in SUBSTITUTION.findall(line):
        yield from commands(inner)
    lexer = shlex.shlex(SUBSTITUTION.sub("OUTPUT", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if token in REDIRECTIONS:
            next(tokens)
        elif token in OPERATORS:
            yield words
            words = []
        else:
            words.append(token)
    yield words


def check_line(line: str) -> None:
    for words in commands(line):
        check(words)


def check(words: list[str]) -> None:
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    if not words or words[0] in UNCHECKED:
        return
    name = words[0].rpartition("/")[2]
    assert name in CHECKS, f"no check for the command {name}"
    CHECKS[name](words[1:])


def check_octavo(arguments: list[str]) -> None:
    try:
        parsed = build_parser().parse_args(arguments)
    except SystemExit as end:
        raise AssertionError(f"octavo {shlex.join(arguments)} is refused with {end.code}") from None
    if parsed.command == "up":
        build_parser().parse_args(["route", "--replica", "http://replica", *parsed.router_args])
        assert parsed.file is None or (ROOT / parsed.file).exists()


def check_make(arguments: list[str]) -> None:
    known = (ROOT / "Makefile").read_text() + (ROOT / "images" / "build").read_text()
    for argument in arguments:
        name, is_setting, _ = argument.partition("=")
        pattern = rf"\b{name}\b" if is_setting else rf"^{re.escape(name)}:"
        assert re.search(pattern, known, re.MULTILINE), argument


def check_kubectl(arguments: list[str]) -> None:
    positional = [argument for argument in arguments if not argument.startswith("-")]
    assert KUBECTL & set(positional)
    for flag, value in pairwise(arguments):
        if flag == "-f":
            assert (ROOT / value).exists(), value
    if "--" in arguments:
        check(arguments[arguments.index("--") + 1 :])


def check_helm(arguments: list[str]) -> None:
    if arguments[0] in {"install", "upgrade"}:
        chart = ROOT / arguments[2]
        assert (chart / "Chart.yaml").exists(), chart
        values = yaml.safe_load((chart / "values.yaml").read_text())
        for flag, setting in pairwise(arguments):
            if flag == "--set":
                assert has_value(values, setting.partition("=")[0].split(".")), setting
    else:
        assert arguments[0] in {"test", "uninstall"}, arguments


def has_value(values: Any, path: list[str]) -> bool:
    """An empty mapping accepts any name."""
    for name in path:
        if values == {}:
            return True
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def check_script(arguments: list[str]) -> None:
    assert (ROOT / arguments[0]).exists(), arguments


def check_pip(arguments: list[str]) -> None:
    for name, extra in re.findall(r"octavo-(\w+)\[(\w+)\]", " ".join(arguments)):
        project = tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
        assert extra in project["optional-dependencies"], f"{name}[{extra}]"


def check_curl(arguments: list[str]) -> None:
    for flag, value in pairwise(arguments):
        if flag == "-d":
            json.loads(value)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "octavo": check_octavo,
    "make": check_make,
    "kubectl": check_kubectl,
    "helm": check_helm,
    "python": check_script,
    "bash": check_script,
    "pip": check_pip,
    "curl": check_curl,
    "eval": lambda _: None,  # its argument is a substitution
}


@pytest.mark.parametrize("block", blocks({"sh", "bash", "console"}))
def test_commands_of_a_block_are_accepted(block: str) -> None:
    for line in logical_lines(block):
        check_line(line)


def test_octavo_commands_in_the_text_exist() -> None:
    named = {name for path in DOCUMENTS for name in INLINE.findall(path.read_text())}
    assert {"serve", "route", "up"} <= named <= COMMANDS.keys()


@pytest.mark.parametrize("block", blocks({"python"}))
def test_python_of_a_block_compiles_and_imports_public_names(block: str) -> None:
    tree = ast.parse(block)
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "octavo_engine"]
    assert {name.name for node in imported for name in node.names} <= set(octavo_engine.__all__)


@pytest.mark.parametrize("block", blocks({"yaml"}))
def test_a_manifest_of_a_block_is_valid(block: str) -> None:
    for manifest in yaml.safe_load_all(block):
        if manifest.get("kind") == KIND:
            read_spec(manifest)


@pytest.mark.parametrize(
    "command",
    [
        "octavo serve --no-such-flag",
        "octavo up -f examples/none.yaml",
        "octavo up --router-args='--no-such-flag'",
        "make no-such-target",
        "make up NO_SUCH_SETTING=1",
        "kubectl apply -f examples/none.yaml",
        "kubectl exec POD -- octavo no-such-command",
        "helm install octavo charts/none",
        "helm install octavo charts/octavo --set monitoring.none=1",
        "python benchmarks/none.py",
        "pip install 'octavo-server[none]'",
        "curl URL -d '{'",
        "no-such-program",
        "echo $(octavo none)",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check_line(command)
