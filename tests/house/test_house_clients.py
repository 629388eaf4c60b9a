"""docs/reference/clients.md has the versions of clients that `make test-clients` installs, and no failed cell."""

import json
import re

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
