"""docs/reference/conformance.md has the rows of the conformance tests, and no promised row is missing."""

import pytest
from octavo_testing.conformance import (
    DOCUMENT,
    ENDPOINTS,
    FAIL,
    NOT_RUN,
    PASS,
    TOPICS,
    Row,
    documented_rows,
    render,
    stated_rows,
)

REMEDY = "run: make test JOBS=1 TESTS=tests/conformance ARGS=--update-conformance"


def test_document_has_the_rows_of_the_tests(request):
    if request.config.getoption("--update-conformance"):
        pytest.skip("the document is being written")
    committed, stated = DOCUMENT.read_text(), render(stated_rows(), {})
    assert documented_rows(committed) == documented_rows(stated), REMEDY
    assert committed.splitlines()[:8] == stated.splitlines()[:8], REMEDY


def test_every_row_occurs_once():
    stated = [(row.key, row.behaviour) for row in stated_rows()]
    assert len(set(stated)) == len(stated)


def test_every_number_and_endpoint_has_a_row():
    promised = {*ENDPOINTS, *(str(number) for numbers in TOPICS.values() for number in numbers)}
    assert promised == {row.key for row in stated_rows()}


def test_failed_or_skipped_rows_are_never_marked_pass():
    rows = [Row("1", name, "HTTP") for name in ("passed", "failed", "left out")]
    document = render(rows, {rows[0]: PASS, rows[1]: FAIL})
    results = {line.split(" | ")[1]: line.split(" | ")[3] for line in document.splitlines() if line.startswith("| 1")}
    assert results == {"passed": "pass |", "failed": "**fail** |", "left out": f"{NOT_RUN} |"}
