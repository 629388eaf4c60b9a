"""Check the rules of the layout that no other tool checks; print each violation and exit with 1 if there is one.

`operator/`, `engine/` and `server/` have no `__init__.py`, because a package `operator` at the root would shadow the
standard library's. Every `__init__.py` but the engine's public face is empty, so that the import of a light module
imports nothing else (an import in a parent package would be invisible to the import contracts). Folders of tests have
no `__init__.py`. A module of tests is slow or fast as a whole.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = ("engine", "server", "operator")
PUBLIC_FACE = Path("engine/src/octavo_engine/__init__.py")
TESTS = ("tests", "e2e")
NAMES_WITHOUT_MEANING = ("utils", "common", "helpers", "misc")


def violations(root: Path) -> Iterator[str]:
    for distribution in DISTRIBUTIONS:
        if (root / distribution / "__init__.py").exists():
            yield f"{distribution}/__init__.py: must not exist, it would make the folder a package"
        for init in sorted((root / distribution / "src").rglob("__init__.py")):
            place = init.relative_to(root)
            if place != PUBLIC_FACE and init.read_text().strip():
                yield f"{place}: must be empty; only {PUBLIC_FACE} has content"
    for init in sorted(path for tests in TESTS for path in (root / tests).rglob("__init__.py")):
        if "support" not in init.relative_to(root).parts:
            yield f"{init.relative_to(root)}: must not exist, as folders of tests are no packages"
    for test in sorted((root / "tests").rglob("test_*.py")):
        if "\n@pytest.mark.slow" in test.read_text():
            yield f"{test.relative_to(root)}: mark the whole module as slow (pytestmark), or move its slow tests"
    yield from _unfit_names(root)


def _unfit_names(root: Path) -> Iterator[str]:
    seen: dict[str, Path] = {}
    for test in sorted(path for tests in TESTS for path in (root / tests).rglob("test_*.py")):
        place = test.relative_to(root)
        if test.name in seen:
            yield f"{place}: the name is used by {seen[test.name]}; names of test files are unique"
        seen[test.name] = place
    for folder in (*(f"{name}/src" for name in DISTRIBUTIONS), *TESTS, "benchmarks", "tools"):
        for path in sorted((root / folder).rglob("*.py")):
            if path.stem in NAMES_WITHOUT_MEANING:
                yield f"{path.relative_to(root)}: name the file after the thing in it"


def main() -> int:
    found = list(violations(ROOT))
    print(*(found or ["layout: no violations"]), sep="\n", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
