"""Every make target, link, path and module that the documents name exists, and docstrings name existing paths."""

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = ("engine", "server", "operator")
DOCUMENTS = [
    path.relative_to(ROOT)
    for pattern in (
        *("*.md", "docs/**/*.md", "e2e/*.md", "examples/**/*.md", "benchmarks/**/*.md"),
        *(f"{name}/*.md" for name in DISTRIBUTIONS),
    )
    for path in ROOT.glob(pattern)
]
TARGET = re.compile(r"^([a-z0-9-]+):", re.MULTILINE)
MAKE_COMMAND = re.compile(r"(?:`|^|make\S* )make ([a-z0-9-]+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
FOLDERS = (*DISTRIBUTIONS, "benchmarks", "charts", "crds", "docs", "e2e", "examples", "images", "tests", "tools")
#: A path from the root, anywhere in a text. It may be a pattern.
ROOT_PATH = re.compile(rf"(?<![\w/.:~$@{{}}-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*]")
SPAN = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
SOURCE = re.compile(r"\.(?:py|cpp|cu|sh|md)$")
MODULE = re.compile(r"\boctavo_(?:engine|server|operator)(?:\.[a-zA-Z_]\w*)+")
GENERATED = frozenset({"build", "dist", "results"})
REMOVED = re.compile(r"git log -- [^\s`]+")  # names a file of an earlier version


@cache
def tree() -> frozenset[str]:
    """Return the paths of all files and of the folders that have one."""
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files = [path for path in files if not {"__pycache__", "_build"} & {*path.parts}]
    files += [path.relative_to(ROOT) for path in ROOT.glob("*") if path.is_file()]
    return frozenset(str(part) for path in files for part in (path, *path.parents))


@cache
def path_ends() -> frozenset[str]:
    """A document may give the end of a path: `core/planner.py`."""
    parts = [path.split("/") for path in tree()]
    return frozenset("/".join(path[start:]) for path in parts for start in range(len(path)))


@cache
def folder_names() -> frozenset[str]:
    return frozenset(name for path in tree() for name in path.split("/")[:-1])


def missing_paths(text: str) -> Iterator[str]:
    """Yield the paths in a text that do not exist. In backticks, words with a slash are paths if the tree has a folder
    of the first name, or if a slash ends them.
    """
    text = REMOVED.sub("git log", text)
    for path in ROOT_PATH.findall(text):
        if not fnmatch.filter(tree(), path) if "*" in path else path not in tree():
            yield path
    for word in (word for span in SPAN.findall(text) for word in span.split() if NAME.fullmatch(word)):
        first, slash, _ = word.partition("/")
        is_folder = slash and (first in folder_names() or word.endswith("/")) and first not in GENERATED
        if (is_folder or SOURCE.search(word)) and word.rstrip("/") not in path_ends():
            yield word


def missing_modules(text: str) -> Iterator[str]:
    for name in MODULE.findall(text):
        module = f"{name.split('_')[1].split('.')[0]}/src/{name.replace('.', '/')}"
        parent, _, member = module.rpartition("/")
        files = [path for path in (f"{parent}.py", f"{parent}/__init__.py") if path in tree()]
        is_member = any(re.search(rf"\b{member}\b", (ROOT / path).read_text()) for path in files)
        if not {module, f"{module}.py"} & tree() and not is_member:
            yield name


def targets() -> set[str]:
    return set(TARGET.findall((ROOT / "Makefile").read_text()))


def heading_anchor(line: str) -> str:
    return re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")


def test_make_lists_every_target() -> None:
    listing = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make ([a-z0-9-]+)", listing.stdout, re.MULTILINE)) == targets()
    assert {"help", "setup", "up", "serve", "images", "test", "test-slow", "e2e", "lint", "bench"} <= targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_a_document_names_existing_targets_and_links(document: Path) -> None:
    text = (ROOT / document).read_text()
    assert set(MAKE_COMMAND.findall(text)) <= targets()
    for target, anchor in LINK.findall(text):
        linked = (ROOT / document).parent / target if target else ROOT / document
        assert linked.exists(), f"{document} links to {target}"
        if anchor:
            headings = [line for line in linked.read_text().splitlines() if line.startswith("#")]
            assert anchor in map(heading_anchor, headings), f"{document} links to {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_paths_and_modules_that_a_document_names_exist(document: Path) -> None:
    text = (ROOT / document).read_text()
    assert [*missing_paths(text), *missing_modules(text)] == []


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_paths_that_docstrings_and_comments_name_exist(distribution: str) -> None:
    sources = [path for path in (ROOT / distribution / "src").rglob("*") if path.suffix in {".py", ".cpp", ".h"}]
    named = {str(path.relative_to(ROOT)): [*missing_paths(path.read_text())] for path in sources}
    assert {path: missing for path, missing in named.items() if missing} == {}
    assert len(sources) > 50


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `core/none.py`", ["core/none.py"]),
        ("see `none.py`, `planner.py`", ["none.py"]),
        ("see `core/planner.py` and `ops/triton/`", []),
        ("see `ops/none/`", ["ops/none/"]),
        ("see `none/`", ["none/"]),
        ("in `core/none`", ["core/none"]),
        ("removed (`git log -- benchmarks/none.py`), see `none.py`", ["none.py"]),
        ("python benchmarks/none.py --json results/none.json", ["benchmarks/none.py"]),
        ("make test TESTS='tests/unit tests/none'", ["tests/none"]),
        ("tests (`tests/router/test_router_*.py`, `tests/router/test_none_*.py`)", ["tests/router/test_none_*.py"]),
        ("`pods/status`, `nvidia.com/gpu`, `/v1/models`, `results/`, `tokenizer.json`, `org/name`", []),
    ],
)
def test_a_missing_path_is_found(text: str, missing: list[str]) -> None:
    assert sorted(set(missing_paths(text))) == missing


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("octavo_engine.core", True),
        ("octavo_engine.core.planner", True),
        ("octavo_engine.LLM", True),
        ("octavo_server.router.balance.score", True),
        ("octavo_engine.core.planner.NoSuchName", False),
        ("octavo_engine.none", False),
        ("octavo_operator.cluster.none", False),
    ],
)
def test_a_missing_module_is_found(name: str, exists: bool) -> None:
    assert [*missing_modules(f"see `{name}`.")] == ([] if exists else [name])


MAP = re.compile(r"^\| `(octavo_[\w.]+)` \| .*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def test_the_map_names_every_package() -> None:
    tables = dict(MAP.findall((ROOT / "ARCHITECTURE.md").read_text()))
    assert {"octavo_engine", "octavo_server", "octavo_server.router", "octavo_operator"} == tables.keys()
    for name, rows in tables.items():
        folder = ROOT / name.split("_")[1].split(".")[0] / "src" / name.replace(".", "/")
        named = {word for row in rows.splitlines() for word in re.findall(r"`(\w+)`", row.split("|")[1])}
        packages = {path.parent.name for path in folder.glob("*/__init__.py")}
        assert named == packages - {table.rpartition(".")[2] for table in tables}


LIBRARIES = re.compile(r"^\| library of `octavo_(\w+)` \| .*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def imports(path: Path) -> set[str]:
    """Return the third-party libraries that a module imports, except for types only."""
    tree = ast.parse(path.read_text())
    branches = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    for_types = {id(node) for branch in branches for node in ast.walk(branch)}
    nodes = [node for node in ast.walk(tree) if id(node) not in for_types]
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    libraries = {name.partition(".")[0] for name in named}
    return {name for name in libraries - sys.stdlib_module_names if not name.startswith("octavo_")}


def test_the_table_of_libraries_says_where_each_is_imported() -> None:
    tables = dict(LIBRARIES.findall((ROOT / "ARCHITECTURE.md").read_text()))
    assert tables.keys() == set(DISTRIBUTIONS)
    for distribution, rows in tables.items():
        root = ROOT / distribution / "src" / f"octavo_{distribution}"
        used = {(name, str(path.relative_to(root))) for path in root.rglob("*.py") for name in imports(path)}
        cells = [row.split("|") for row in rows.splitlines()]
        listed = {(row[1].strip(" `"), place) for row in cells for place in re.findall(r"`([^`]+)`", row[3])}
        unlisted = {(n, p) for n, p in used if not any(n == m and f"{p}/".startswith(f"{q}/") for m, q in listed)}
        unused = {(n, p) for n, p in listed if not any(n == m and f"{q}/".startswith(f"{p}/") for m, q in used)}
        assert (distribution, unlisted, unused) == (distribution, set(), set())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_distribution_requires_only_libraries_that_it_imports(distribution: str) -> None:
    root = ROOT / distribution
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    required = {re.split(r"[\[<>=]", text)[0] for text in chain(project["dependencies"], *extras)}
    owners = packages_distributions()
    libraries = {name for path in (root / "src").rglob("*.py") for name in imports(path)}
    imported = {owner.lower().replace("_", "-") for name in libraries for owner in owners.get(name, [name])}
    assert {name for name in required if not name.startswith("octavo-")} - imported == set()


def test_readme_fits_one_screen_and_names_the_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert {"up", "serve", "test"} <= set(MAKE_COMMAND.findall(text))
    assert text.count("\n") <= 85


@pytest.mark.parametrize(
    "target", ["setup", "up", "serve", "test", "test-slow", "test-cluster", "lint", "bench", "fmt"]
)
def test_a_target_expands(target: str) -> None:
    """`make -n` fails if a rule on the way is missing."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_serve_passes_its_settings_on() -> None:
    command = ["make", "-n", "serve", "MODEL=a/b", "PORT=81", "ARGS=--seed 1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "octavo serve a/b --port 81 --seed 1" in shown


def test_up_passes_its_settings_on() -> None:
    command = ["make", "-n", "up", "MODEL=a/b", "PORT=81", "REPLICAS=3", "ARGS=--seed 1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "octavo up a/b --replicas 3 --port 81 --seed 1" in shown
