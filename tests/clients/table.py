"""docs/reference/clients.md: what each client was seen to do, and the class of each error that it raises.

A check records entries: a row, a column, a cell, a note and a fault. A cell that differs by the way to the server shows
both.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from faults import FAULTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "clients.md"
FEATURES = ("chat", "stream", "tools", "structured output", "images", "embeddings", "rerank")
NONE = "–"
INTRODUCTION = """\
# Clients

What clients of OpenAI's API, Anthropic's and Cohere's were seen to do with Octavo. `make test-clients` runs each of
them against `octavo serve` and through `octavo route`, and compares what it does with this page; a cell that names
neither holds for both. [Clients](../guide/clients.md) has the settings that each needs.

## Answers

*yes*: the answer was right. *no*: Octavo does not serve it. {none}: not run, as the client has no such call, or sends
what the client of another row sends.
"""
ERRORS = """\
## Errors

The class of the error that the client raises. If its own vendor's API fails in the same way, the client raises the
same class, or the one after *vendor*. A field of a wrong type gets status 400 and never 422, as at these vendors.
"""


class Entry(NamedTuple):
    """`fault`: why the cell is wrong, or None."""

    row: str
    column: str
    cell: str
    note: str
    fault: str | None


def render(entries: dict[str, list[Entry]], versions: dict[str, str]) -> str:
    """`entries`: by way, in the order of the document. `versions`: of each row's client."""
    cells = _merged(entries)
    rows = list(dict.fromkeys(row for row, _ in cells))
    notes = _Notes()
    with_errors = [row for row in rows if any((row, column) in cells for column in FAULTS)]
    answers = _table(["version", *FEATURES], rows, cells, versions, notes)
    errors = _table(list(FAULTS), with_errors, cells, versions, notes)
    return f"{INTRODUCTION.format(none=NONE)}\n{answers}\n{ERRORS}\n{errors}\n## Notes\n\n{notes.text()}"


class _Notes:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, note: str) -> str:
        return f" ({self._numbers.setdefault(note, len(self._numbers) + 1)})" if note else ""

    def text(self) -> str:
        return "".join(f"{number}. {note}\n" for note, number in self._numbers.items())


def _merged(entries: dict[str, list[Entry]]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the text and the note of each cell."""
    found: dict[tuple[str, str], dict[str, Entry]] = {}
    for way, recorded in entries.items():
        for entry in recorded:
            found.setdefault((entry.row, entry.column), {})[way] = entry
    merged = {}
    for key, by_way in found.items():
        texts = {way: entry.cell for way, entry in by_way.items()}
        is_same = len(set(texts.values())) == 1 and len(texts) == len(entries)
        text = next(iter(texts.values())) if is_same else ", ".join(f"{cell} ({way})" for way, cell in texts.items())
        merged[key] = (text, next((entry.note for entry in by_way.values() if entry.note), ""))
    return merged


def _table(
    columns: Iterable[str],
    rows: Iterable[str],
    cells: dict[tuple[str, str], tuple[str, str]],
    versions: dict[str, str],
    notes: _Notes,
) -> str:
    columns = list(columns)
    lines = [f"| client | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        texts = []
        for column in columns:
            text, note = (versions[row], "") if column == "version" else cells.get((row, column), (NONE, ""))
            texts.append(text + notes.mark(note))
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"
