"""The rows of docs/reference/conformance.md. A test declares a row by `@conforms(row, behaviour, how=...)`.

`pytest tests/conformance --update-conformance` writes the document from the results of that run. A row passes only if
all cases of its test ran and passed; a row whose test didn't run says "not run". A test compares the committed document
with the rows that the test files declare, so that neither can change alone.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "reference" / "conformance.md"
TESTS = ROOT / "tests" / "conformance"

#: Topic -> numbers of its behaviours.
TOPICS = {"Requests": range(1, 12), "Streams": range(12, 19), "Answers": range(19, 25)}
ENDPOINTS = (
    *("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/chat/completions/batch", "POST /v1/responses"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /invocations", "GET /v1/models"),
    *("POST /tokenize", "POST /detokenize", "GET /tokenizer_info"),
    *("POST /v1/completions/render", "POST /v1/chat/completions/render"),
    *("GET /health", "GET /ready", "GET /ping", "GET /version", "GET /load", "GET /metrics", "GET /openapi.json"),
    *("POST /sleep", "POST /wake_up", "GET /is_sleeping"),
    *("POST /reset_prefix_cache", "POST /drain", "GET /debug/requests"),
)
#: Fixture -> name of its model or engine in the document.
SERVERS = {
    "real": "SmolLM2",
    "tiny": "tiny",
    "scripted": "scripted",
}
PASS, FAIL, NOT_RUN = "pass", "**fail**", "not run"
INTRODUCTION = """\
# Conformance

Behaviour that clients written for OpenAI's API and for vLLM rely on, checked with Octavo {version}. A test in
`tests/conformance` checks each row; a row names intended differences from vLLM. *Checked with* names the client
(OpenAI's or Anthropic's Python client, or plain HTTP) and the server: `octavo serve` with SmolLM2-135M or a tiny
model of random weights, or a scripted engine whose tokens the test chooses.
"""


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    behaviour: str
    how: str

    def line(self, result: str) -> str:
        return f"| {self.key} | {self.behaviour} | {self.how} | {result} |"


def conforms(key: int | str, behaviour: str, *, how: str) -> pytest.MarkDecorator:
    return pytest.mark.conformance(str(key), behaviour, how)


def row_of(mark: pytest.Mark, test: Callable[..., Any]) -> Row:
    key, behaviour, how = mark.args
    servers = [SERVERS[name] for name in inspect.signature(test).parameters if name in SERVERS]
    return Row(key, behaviour, ", ".join([how, *servers]))


def stated_rows(folder: Path = TESTS) -> list[Row]:
    """Return the rows that all test files declare, collected or not, in the order of the document."""
    tests = [test for path in sorted(folder.glob("test_*.py")) for test in vars(_load(path)).values()]
    marks = [(mark, test) for test in tests if callable(test) for mark in getattr(test, "pytestmark", ())]
    rows = [row_of(mark, test) for mark, test in marks if mark.name == "conformance"]
    order = [*ENDPOINTS, *(str(number) for numbers in TOPICS.values() for number in numbers)]
    return sorted(rows, key=lambda row: order.index(row.key))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"stated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render(rows: Iterable[Row], results: Mapping[Row, str]) -> str:
    rows = list(rows)
    sections = {"Endpoints": [row for row in rows if row.key in ENDPOINTS]}
    for topic, numbers in TOPICS.items():
        sections[topic] = [row for row in rows if row.key.isdigit() and int(row.key) in numbers]
    parts = [INTRODUCTION.format(version=version("octavo-server"))]
    for title, found in sections.items():
        head = f"## {title}\n\n| | behaviour | checked with | result |\n|---|---|---|---|\n"
        parts.append(head + "".join(row.line(results.get(row, NOT_RUN)) + "\n" for row in found))
    return "\n".join(parts)


def documented_rows(document: str) -> list[str]:
    """Return the lines of the tables without the column of results."""
    lines = [line for line in document.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return [line.rsplit("|", 2)[0] for line in lines]


class Outcomes:
    """A pytest plugin that collects the results of each row's tests and writes the document at the end."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Row]] = {}
        self._results: dict[Row, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = item.iter_markers("conformance")
            if isinstance(item, pytest.Function) and (rows := [row_of(mark, item.function) for mark in marks]):
                self._rows[item.nodeid] = rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for row in self._rows.get(report.nodeid, ()):
            if report.failed:
                self._results[row] = FAIL
            elif report.skipped and self._results.get(row) != FAIL:
                self._results[row] = NOT_RUN
            elif report.when == "call":
                self._results.setdefault(row, PASS)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        DOCUMENT.write_text(render(stated_rows(), self._results))


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write docs/reference/conformance.md from this run"
    parser.addoption("--update-conformance", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance(row, behaviour, how): a row of docs/reference/conformance.md")
    if config.getoption("--update-conformance"):
        config.pluginmanager.register(Outcomes(), "conformance-outcomes")
