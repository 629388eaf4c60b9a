"""What is compiled for the router's image can be compiled without becoming something else."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "engine" / "src", ROOT / "server" / "src")


@pytest.fixture(scope="module")
def compiled():
    spec = importlib.util.spec_from_file_location("compile_router", ROOT / "tools" / "compile_router.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {path: _tree(path) for path in module.paths()}


def _tree(path):
    (found,) = [source / path for source in SOURCES if (source / path).exists()]
    return ast.parse(found.read_text())


def _classes(tree):
    return {
        node.name: {ast.unparse(base) for base in node.bases} for node in tree.body if isinstance(node, ast.ClassDef)
    }


def test_annotations_of_compiled_classes_are_read_by_nobody(compiled):
    bases = {base for tree in compiled.values() for of in _classes(tree).values() for base in of}
    assert bases
    assert not [base for base in bases if "Struct" in base or "Model" in base]


def test_nobody_else_inherits_from_a_compiled_class(compiled):
    names = {name for tree in compiled.values() for name in _classes(tree)}
    others = {str(path.relative_to(source)): path for source in SOURCES for path in source.rglob("*.py")}
    for name in compiled.keys() & others.keys():
        del others[name]
    for path in others.values():
        for bases in _classes(ast.parse(path.read_text())).values():
            assert not names & {base.rpartition(".")[2] for base in bases}, path
