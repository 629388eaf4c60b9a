"""docs/reference/clients.md has the versions of clients that `make test-clients` installs, and no failed cell."""

import importlib
import json
import re
from pathlib import Path

import pytest
from octavo_testing.conformance import FAIL, ROOT

CLIENTS = ROOT / "tests" / "clients"
REMEDY = "run: make test-clients ARGS=--update"
PYTHON_PIN = re.compile(r"^[\w-]+(?:\[.*\])?==(\S+)$", re.MULTILINE)


def documented() -> str:
    return (ROOT / "docs" / "reference" / "clients.md").read_text()


def test_versions_are_those_that_are_installed():
    packages = json.loads((CLIENTS / "node" / "package.json").read_text())["dependencies"]
    pins = [pin for path in (CLIENTS / "python").glob("*.txt") for pin in PYTHON_PIN.findall(path.read_text())]
    answers = documented().partition("## Answers")[2].partition("## Errors")[0]
    versions = re.findall(r"^\| [^|]+ \| (\d[^ ]*) \|", answers, re.MULTILINE)
    assert versions
    assert {*versions} <= {*pins, *packages.values()}, REMEDY


def test_no_cell_has_failed():
    assert FAIL not in documented()


def test_clients_of_node_count_as_absent_without_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier run may have installed them."""
    monkeypatch.syspath_prepend(CLIENTS)
    install_node = importlib.import_module("install").install_node
    (tmp_path / "node_modules/openai").mkdir(parents=True)
    (tmp_path / "node_modules/openai/package.json").write_text('{"version": "7.57.0"}')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_node(tmp_path) == {}
    assert "node and npm not found" in capsys.readouterr().err
