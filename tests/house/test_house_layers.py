"""A package of the engine names no package above it in a string; import-linter finds the imports of statements.

Such a string is a function to import ("octavo_engine.runner.capacity:plan_capacity") or a module to run (`-m`).
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "engine" / "src"
NAMED = re.compile(r"\boctavo_engine((?:\.\w+)+)")


def floors() -> dict[str, int]:
    """Return the floor of each package, 0 for `wire`. Packages of one floor import nothing of each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["octavo_engine"])
    return {name: floor for floor, names in enumerate(reversed(layers)) for name in re.findall(r"\w+", names)}


FLOORS = floors()


def names_in_strings(source: str) -> Iterator[str]:
    """Yield the modules that strings other than docstrings name."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from NAMED.findall(node.value)


def upward_names(package: str, source: str) -> list[str]:
    """Return the names in a file of `package` that it must not import."""
    names = [name.strip(".") for name in names_in_strings(source)]
    return [name for name in names if not _is_importable(name.partition(".")[0], package)]


def _is_importable(named: str, package: str) -> bool:
    return named not in FLOORS or named == package or FLOORS[named] < FLOORS[package]


def engine_files() -> list[Path]:
    files = sorted(path.relative_to(SOURCES) for path in SOURCES.rglob("*.py"))
    return [path for path in files if path.parts[1] in FLOORS]


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("runner", 'LOADER = "octavo_engine.process.main:run"', ["process.main"]),
        ("core", 'run(sys.executable, "-m", "octavo_engine.offline.llm")', ["offline.llm"]),
        ("settings", 'command = f"{python} -m octavo_engine.ops.prebuilt"', ["ops.prebuilt"]),
        ("core", 'import_module("octavo_engine.devices.dtype")', ["devices.dtype"]),
        ("loop", 'find("octavo_engine.runner.load:load")', []),
        ("process", '("-m", "octavo_engine.process.main")', []),
        ("core", '"""Calls nothing of `octavo_engine.runner.runner`."""', []),
    ],
)
def test_a_string_that_names_a_package_above_is_found(package: str, source: str, found: list[str]) -> None:
    assert upward_names(package, source) == found


def test_no_string_names_a_package_above() -> None:
    files = engine_files()
    named = {str(path): upward_names(path.parts[1], (SOURCES / path).read_text()) for path in files}
    assert {path: names for path, names in named.items() if names} == {}
    assert {path.parts[1] for path in files} == set(FLOORS)


def test_modules_that_strings_name_exist() -> None:
    """A type checker reads no strings, so a moved module leaves its old name in them."""
    named = {name for path in SOURCES.rglob("*.py") for name in names_in_strings(path.read_text())}
    paths = {name: SOURCES / "octavo_engine" / name.strip(".").replace(".", "/") for name in named}
    assert [name for name, path in paths.items() if not (path.with_suffix(".py").exists() or path.is_dir())] == []
    assert {".process.main", ".runner.capacity", ".offline.llm"} <= named
