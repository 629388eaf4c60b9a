"""The step of the engine's image that compiles the kernels has every module that it imports."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "engine" / "src"
COPIED = re.compile(r"engine/src/(octavo_engine/\S+\.py)")


def imported(module: str) -> set[str]:
    """Return the paths of our own modules that a module imports, also inside of functions."""
    tree = ast.parse((SOURCES / module).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {f"{name.replace('.', '/')}.py" for name in names if name.startswith("octavo_engine.")}


def test_the_step_that_compiles_kernels_copies_what_it_imports() -> None:
    stage = (ROOT / "images" / "engine.Dockerfile").read_text().partition("AS kernels\n")[2].partition("\nFROM")[0]
    copied = set(COPIED.findall(stage))
    assert "octavo_engine/ops/prebuilt.py" in copied
    assert {name for module in copied for name in imported(module)} <= copied
