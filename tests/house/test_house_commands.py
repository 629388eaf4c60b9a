"""Every make target, script and link that the documents name exists."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "e2e/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
]
TARGET = re.compile(r"^([a-z0-9-]+):", re.MULTILINE)
MAKE_COMMAND = re.compile(r"(?:`|^|make\S* )make ([a-z0-9-]+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
SOURCE = re.compile(r"`([\w/.-]+\.(?:py|cpp))`")
FOLDERS = ("engine", "server", "operator", "tests", "e2e", "benchmarks", "examples", "tools", "docs")
SCRIPT = re.compile(r"`?((?:benchmarks|examples|tools)/[\w/]+\.(?:py|sh))`?")


def targets() -> set[str]:
    return set(TARGET.findall((ROOT / "Makefile").read_text()))


def heading_anchor(line: str) -> str:
    return re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")


def test_make_lists_every_target() -> None:
    listing = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make ([a-z0-9-]+)", listing.stdout, re.MULTILINE)) == targets()
    assert {"help", "setup", "up", "serve", "images", "test", "test-slow", "e2e", "lint", "bench"} <= targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_a_document_names_existing_targets_scripts_and_links(document: Path) -> None:
    text = (ROOT / document).read_text()
    assert set(MAKE_COMMAND.findall(text)) <= targets()
    assert [script for script in SCRIPT.findall(text) if not (ROOT / script).exists()] == []
    for target, anchor in LINK.findall(text):
        linked = (ROOT / document).parent / target if target else ROOT / document
        assert linked.exists(), f"{document} links to {target}"
        if anchor:
            headings = [line for line in linked.read_text().splitlines() if line.startswith("#")]
            assert anchor in map(heading_anchor, headings), f"{document} links to {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_source_files_that_a_document_names_exist(document: Path) -> None:
    """A document gives the end of a path: `core/planner.py`."""
    named = set(SOURCE.findall((ROOT / document).read_text()))
    paths = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.[pc]*")]
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in paths)] == []


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
