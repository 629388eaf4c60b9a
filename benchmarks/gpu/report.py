"""Lines of results, each with a status, the step, a name, a value, its unit and a note; and their summary."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from table import number

STEPS = ("machine", "kernels", "tokens", "serve", "speed", "ranks")  # in the order of their worth
MANY = ("machine", "kernels")  # steps whose `ok` lines are printed last
MOST_PRINTED, MOST_OF_STATUS = 120, {"FAIL": 50, "skip": 10, "figure": 50, "ok": 40}
LINES, SUMMARY, LOG = "lines.jsonl", "summary.txt", "log.txt"


@dataclass(frozen=True, slots=True)
class Line:
    step: str
    name: str
    status: str
    value: Any = None
    unit: str = ""
    note: str = ""

    def text(self, width: int) -> str:
        shown = number(self.value) if isinstance(self.value, float) else self.value
        value = "" if self.value is None else f" = {shown} {self.unit}".rstrip()
        note = f": {self.note}" if self.note else ""
        return f"{self.status:6} {self.step:7} {self.name}{value}{note}"[:width]


def append_line(folder: Path, line: Line) -> None:
    """Append a line in one write, as several processes append to one file."""
    with (folder / LINES).open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read_lines(folder: Path) -> list[Line]:
    path = folder / LINES
    return [Line(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def forget_steps(folder: Path, steps: set[str]) -> None:
    """Remove the lines that an earlier run of these steps has left."""
    kept = [line for line in read_lines(folder) if line.step not in steps]
    (folder / LINES).write_text("".join(json.dumps(asdict(line)) + "\n" for line in kept))


def write_summary(folder: Path) -> list[str]:
    """Write every line to the summary; return the lines to print: failures first, then figures, then what is right."""
    lines = sorted(read_lines(folder), key=lambda line: STEPS.index(line.step))
    (folder / SUMMARY).write_text("".join(line.text(2000) + "\n" for line in lines))
    counts = Counter((line.step, line.status) for line in lines)
    steps = dict.fromkeys(line.step for line in lines)
    printed = [f"== {step}: " + ", ".join(f"{counts[step, kind]} {kind}" for kind in MOST_OF_STATUS) for step in steps]
    for status, most in MOST_OF_STATUS.items():
        group = [line for line in lines if line.status == status]
        if status == "ok":
            group.sort(key=lambda line: line.step in MANY)
        room = max(0, min(most, MOST_PRINTED - len(printed) - 3))
        printed += [line.text(300 if status == "FAIL" else 160) for line in group[:room]]
        if len(group) > room:
            printed.append(f"... and {len(group) - room} more lines of status {status}: see {SUMMARY}")
    return [*printed, f"All lines: {folder / SUMMARY}; tracebacks: {LOG} beside it"]
