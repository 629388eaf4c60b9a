"""A step of `benchmarks/gpu/run`: its folders, device and time, its reports, and its cases.

A step is the module `gpu.steps.NAME`, which the driver runs as a process group of its own and kills at the end. A CUDA
error poisons its process, and a case may hang or kill it: so each case gets a process, forked with what is imported.
"""

import argparse
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, get_context
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
        self.report("ok" if passed else "FAIL", name, note, value, unit)

    def figure(self, name: str, value: Any = None, unit: str = "", note: str = "") -> None:
        self.report("figure", name, note, value, unit)

    def report(self, status: str, name: str, note: str, value: Any = None, unit: str = "") -> None:
        line = Line(self.name, name, status, value, unit, note)
        for folder in (self.folder, self.work):
            append_line(folder, line)
        print(line.text(2000), flush=True)

    def measured(self, name: str) -> float | None:
        """Return a figure of an earlier step, of this run or else of the last one on this machine."""
        lines = [*read_lines(self.work), *read_lines(self.folder)]
        return next((float(line.value) for line in reversed(lines) if line.name == name and line.value), None)


class LeftOut(Exception):
    """A case, or the rest of it, can't run here or has too little time."""


Case = Callable[[Step], None]


def _describe(error: BaseException) -> str:
    """Return the type, the first lines of the message, and the innermost frames in this project's files."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "octavo" in frame.filename] or frames
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in own[:-4:-1])
    return f"{type(error).__name__}: {' / '.join(str(error).strip().splitlines()[:3])[:400]} [{places}]"


def parse_step(name: str) -> Step:
    """Return the step that the command line describes."""
    parser = argparse.ArgumentParser(prog=f"gpu.steps.{name}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ends", type=float, default=time.monotonic() + 600, help="a time of CLOCK_MONOTONIC")
    parser.add_argument("--match", default="", help="regular expression of the names of cases. Default: all")
    return Step(name=name, work=Path(os.environ["OCTAVO_GPU_WORK"]), **vars(parser.parse_args()))


def run_case(step: Step, name: str, case: Case) -> None:
    """Run a case, which reports its own lines; an exception is a line with the case's name."""
    try:
        case(step)
        if step.is_gpu:
            import torch

            torch.cuda.synchronize()
    except LeftOut as error:
        step.report("skip", name, str(error))
    except Exception as error:
        logging.exception("The case %s failed.", name)
        step.report("FAIL", name, _describe(error))


def run_cases(step: Step, cases: Mapping[str, Case], *, workers: int = 1, case_s: float) -> None:
    """Run the cases whose names match, in this order, `workers` beside each other, each at most `case_s` seconds.

    Cases are forked, so this process must not use the GPU, nor torch's threads. Raises RuntimeError if it has a
    context of CUDA, which its children could not use.
    """
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise RuntimeError("the process of the step uses CUDA, so its cases can't: import or compute less before them")
    waiting = [name for name in cases if re.search(step.match, name)]
    running: dict[Any, float] = {}  # processes, and when they have to end
    while running or (waiting and step.seconds_left() > 2):
        while waiting and len(running) < workers and step.seconds_left() > 2:
            name = waiting.pop(0)
            process = get_context("fork").Process(target=_run, args=(step, name, cases[name], workers > 1), name=name)
            process.start()
            running[process] = min(time.monotonic() + case_s, step.ends)
        nearest = min(running.values(), default=0.0)
        connection.wait([each.sentinel for each in running], max(0.0, nearest - time.monotonic()))
        for process, ends in [*running.items()]:
            code = process.exitcode
            if code is None and time.monotonic() < ends:
                continue
            if code is None:
                process.kill()
                is_late = ends == step.ends
                note = "stopped, as no time was left" if is_late else f"it hangs: no answer within {case_s:.0f} s"
                step.report("skip" if is_late else "FAIL", process.name, note)
            elif code:
                step.report("FAIL", process.name, f"its process ended with {code}: see log.txt")
            process.join()
            del running[process]
    if waiting:
        step.report("skip", f"{len(waiting)} cases", "no time was left: " + ", ".join(waiting)[:300])


def _run(step: Step, name: str, case: Case, is_crowded: bool) -> None:
    """Run a case, and end its process without a teardown, which could hang."""
    if is_crowded:  # OpenMP's threads of other cases spin
        import torch

        torch.set_num_threads(2 if step.is_gpu else 1)
    run_case(step, name, case)
    sys.stdout.flush()
    os._exit(0)
