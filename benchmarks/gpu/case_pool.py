"""Cases of a step in processes beside each other: a CUDA error poisons its process, and a case may hang or kill it.

A worker runs one case at a time: the parent writes its name into the worker's input, and reads "done" from its output.
A worker that answers nothing within the limit of a case, or ends, costs that case; the others run in a new process.
"""

import contextlib
import logging
import os
import re
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping

from gpu.step import Step, parse_step

Case = Callable[[Step], None]
Worker = subprocess.Popen[str]
POISON = ("CUDA error", "AcceleratorError", "[CUDA]", "CUBLAS", "device is lost", "illegal")
READY, DONE, POISONED = "ready\n", "done\n", "poisoned\n"
START_S = 90.0  # a worker's imports


def run_cases(
    name: str,
    cases_of: Callable[[Step], Mapping[str, Case]],
    *,
    workers: Callable[[Step], int],
    case_s: Callable[[Step], float],
    is_fresh: bool = False,
) -> int:
    """Run the cases of a step whose names match, in this order; in a worker, run those that its parent names.

    A case reports its own lines; an exception is a line `FAIL` with the case's name. `case_s` is the most seconds of a
    case. `is_fresh`: each case gets a process of its own. Imports of the engine belong into the cases.
    """
    step, is_worker = parse_step(name)
    cases = cases_of(step)
    if is_worker:
        _serve(step, cases)
    pool = _Pool(step, deque(case for case in cases if re.search(step.match, case)), case_s(step), is_fresh)
    threads = [threading.Thread(target=pool.drive) for _ in range(max(1, min(workers(step), len(pool.waiting))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if pool.waiting:
        step.fail(f"{len(pool.waiting)} cases not run", "no time was left: " + ", ".join(pool.waiting)[:300])
    return 0


class _Pool:
    def __init__(self, step: Step, waiting: deque[str], case_s: float, is_fresh: bool) -> None:
        self.step, self.waiting, self._case_s, self._is_fresh = step, waiting, case_s, is_fresh
        self._can_start = True

    def drive(self) -> None:
        """Run cases in one worker after the other until none waits, or no time is left."""
        worker: Worker | None = None
        while self.waiting and self._can_start and self.step.seconds_left() > 2:
            worker = worker or self._start()
            name = self._next() if worker else None
            if worker and (name is None or not self._run(worker, name) or self._is_fresh):
                worker = _end(worker)
        if worker:
            _end(worker)

    def _next(self) -> str | None:
        try:
            return self.waiting.popleft()
        except IndexError:  # another thread was faster
            return None

    def _start(self) -> Worker | None:
        step = self.step
        command = [sys.executable, "-m", f"gpu.steps.{step.name}", str(step.folder), "--worker"]
        command += ["--device", step.device, "--ends", str(step.ends)]
        worker = Worker(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if _answer(worker, min(START_S, step.seconds_left())) == READY:
            return worker
        if self._can_start and step.seconds_left() > 2:
            step.fail("start of a worker", f"exit code {worker.poll()} before its first case: see log.txt")
        self._can_start = False
        return _end(worker)

    def _run(self, worker: Worker, name: str) -> bool:
        """Run a case; return whether the worker can run another one."""
        limit = min(self._case_s, self.step.seconds_left())
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer shows
            worker.stdin.write(name + "\n")
            worker.stdin.flush()
        answer = _answer(worker, limit)
        if answer is None:
            cause = "it hangs: no answer within" if limit == self._case_s else "no time was left: it was stopped after"
            self.step.fail(name, f"{cause} {limit:.0f} s")
        elif not answer:
            self.step.fail(name, f"its process ended with {worker.wait()}: see log.txt")
        return answer == DONE


def _answer(worker: Worker, seconds: float) -> str | None:
    """Return the next line of a worker, "" if it has ended, or None after `seconds`."""
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], max(seconds, 0.0))
    return worker.stdout.readline() if ready else None


def _end(worker: Worker) -> None:
    worker.kill()
    worker.wait()


def _serve(step: Step, cases: Mapping[str, Case]) -> None:
    """Run the cases that the parent names, and end this process without a teardown, which could hang."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of a case are for the log
    print(READY, end="", file=answers, flush=True)
    for line in sys.stdin:
        answer, name = DONE, line.removesuffix("\n")
        try:
            cases[name](step)
            if step.is_gpu:
                import torch

                torch.cuda.synchronize()
        except Exception as error:
            logging.exception("The case %s failed.", name)
            step.fail(name, error)
            answer = POISONED if any(word in f"{type(error).__name__} {error}" for word in POISON) else DONE
        print(answer, end="", file=answers, flush=True)
    os._exit(0)
