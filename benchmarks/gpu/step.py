"""Context of a step of `benchmarks/gpu/run`: its folders, device and time, and its reports.

A step is the module `gpu.steps.NAME`. The driver runs it as a process and a process group of its own, and kills the
group at the end, so a step may leave no process behind in a group of its own.
"""

import argparse
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.report import Line, append_line, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`folder` gets the results; `work` has files that outlive a run; `ends`: a time of `time.monotonic`, which all
    processes share."""

    name: str
    folder: Path
    work: Path
    device: str
    match: str
    ends: float

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def check(self, name: str, passed: bool, value: Any = None, unit: str = "", note: str = "") -> None:
        self._append(Line(self.name, name, "ok" if passed else "FAIL", value, unit, note))

    def figure(self, name: str, value: Any = None, unit: str = "", note: str = "") -> None:
        self._append(Line(self.name, name, "figure", value, unit, note))

    def fail(self, name: str, cause: BaseException | str) -> None:
        self._append(Line(self.name, name, "FAIL", note=cause if isinstance(cause, str) else _describe(cause)))

    def measured(self, name: str) -> float | None:
        """Return a figure of an earlier step, of this run or else of the last one on this machine."""
        lines = [*read_lines(self.work), *read_lines(self.folder)]
        return next((float(line.value) for line in reversed(lines) if line.name == name and line.value), None)

    def _append(self, line: Line) -> None:
        for folder in (self.folder, self.work):
            append_line(folder, line)
        print(line.text(2000), flush=True)


def _describe(error: BaseException) -> str:
    """Return the type, the first lines of the message, and the innermost frames in this project's files."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "octavo" in frame.filename] or frames
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in own[:-4:-1])
    return f"{type(error).__name__}: {' / '.join(str(error).strip().splitlines()[:3])[:400]} [{places}]"


def parse_step(name: str) -> tuple[Step, bool]:
    """Return the step that the command line describes, and whether this process is a worker of its pool."""
    parser = argparse.ArgumentParser(prog=f"gpu.steps.{name}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ends", type=float, default=time.monotonic() + 600, help="a time of CLOCK_MONOTONIC")
    parser.add_argument("--match", default="", help="regular expression of the names of cases. Default: all")
    parser.add_argument("--worker", action="store_true")
    args = vars(parser.parse_args())
    is_worker = args.pop("worker")
    return Step(name=name, work=Path(os.environ["OCTAVO_GPU_WORK"]), **args), is_worker
