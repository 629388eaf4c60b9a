"""Output of results: samples with median, minimum and maximum; plain tables; JSON files."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Samples:
    """The values of one figure over all repetitions."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(min(self.values))}, {number(max(self.values))}]"

    def as_json(self) -> dict[str, Any]:
        summary = {"median": self.median, "min": min(self.values), "max": max(self.values)}
        return {**summary, "values": list(self.values)}


def number(value: float) -> str:
    """Format a figure with about three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table whose first column is aligned to the left and whose others are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for i, row in enumerate(cells):
        first, *others = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())
        if i == 0:
            print("  ".join("-" * width for width in widths))


def save_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, default=lambda samples: samples.as_json()) + "\n")
        print(f"\nsaved: {path}")
