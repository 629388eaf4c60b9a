"""Lines of results: `ok`, `FAIL` or `figure`, the step, a name, a value, its unit and a note; and their summary."""

import json
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = ("machine", "kernels", "tokens", "serve", "speed", "ranks")  # in the order of their worth
MAX_PRINTED, MAX_PER_GROUP = 120, {"FAIL": 50, "figure": 60, "ok": 40}
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
        value = "" if self.value is None else f" = {format_value(self.value)} {self.unit}".rstrip()
        note = f": {self.note}" if self.note else ""
        return f"{self.status:6} {self.step:7} {self.name}{value}{note}"[:width]


def format_value(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def append_line(folder: Path, line: Line) -> None:
    """Append a line in one write, as several processes append to one file."""
    with (folder / LINES).open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read_lines(folder: Path) -> list[Line]:
    path = folder / LINES
    return [Line(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def forget_step(folder: Path, step: str) -> None:
    """Remove the lines that an earlier run of a step has left."""
    kept = [line for line in read_lines(folder) if line.step != step]
    (folder / LINES).write_text("".join(json.dumps(asdict(line)) + "\n" for line in kept))


def describe_error(error: BaseException) -> str:
    """Return the type, the first lines of the message, and the innermost frames in this project's files."""
    text = " / ".join(str(error).strip().splitlines()[:3])[:400]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "octavo" in frame.filename] or list(frames)
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(own[-3:]))
    return f"{type(error).__name__}: {text} [{places}]"


def write_summary(folder: Path) -> list[str]:
    """Write every line and the ends of the log's tracebacks to the summary; return the lines to print."""
    lines = sorted(read_lines(folder), key=lambda line: STEPS.index(line.step))
    log = folder / LOG
    ends = dict.fromkeys(_traceback_ends(log.read_text(errors="replace").splitlines() if log.exists() else []))
    title = f"Ends of the tracebacks; all of them are in {LOG}"
    text = "\n".join([*(line.text(2000) for line in lines), "", title, *ends])
    (folder / SUMMARY).write_text(text[:400_000] + "\n")
    counts = Counter((line.step, line.status) for line in lines)
    steps = dict.fromkeys(line.step for line in lines)
    printed = [f"== {step}: " + ", ".join(f"{counts[step, kind]} {kind}" for kind in MAX_PER_GROUP) for step in steps]
    for status, most in MAX_PER_GROUP.items():
        group = [line.text(300 if status == "FAIL" else 160) for line in lines if line.status == status]
        room = min(most, MAX_PRINTED - len(printed) - 3)
        printed += group[:room]
        if len(group) > room:
            printed.append(f"... and {len(group) - room} more lines of status {status}: see {SUMMARY}")
    return printed


def _traceback_ends(log: list[str]) -> Iterator[str]:
    """Yield the last twelve lines of each traceback."""
    for i, first in enumerate(log):
        if first.startswith("Traceback (most recent call last)"):
            rest = (n for n in range(i + 1, len(log)) if log[n] and not log[n].startswith((" ", "Traceback")))
            end = next(rest, len(log) - 1)
            yield "\n".join([first, *log[max(i + 1, end - 11) : end + 1]])
