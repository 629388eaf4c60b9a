"""Cases of a step in processes beside each other: a CUDA error poisons its process, and a case may hang or kill it.

A worker runs one case at a time: the parent writes its name into the worker's input, and reads "done" from its output.
A worker that answers nothing within the limit of a case, or ends, costs that case; the others run in a new process.
"""

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
POISON = ("CUDA error", "AcceleratorError", "[CUDA]", "CUBLAS", "device is lost", "illegal")
READY, DONE, POISONED = "ready\n", "done\n", "poisoned\n"


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
    waiting = deque(case for case in cases if re.search(step.match, case))
    pool = _Pool(step, waiting, case_s(step), is_fresh)
    threads = [threading.Thread(target=pool.drive) for _ in range(max(1, min(workers(step), len(waiting))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if waiting:
        step.fail(f"{len(waiting)} cases not run", "no time was left: " + ", ".join(waiting)[:300])
    return 0


class _Pool:
    START_S = 90.0  # imports of a worker

    def __init__(self, step: Step, waiting: deque[str], case_s: float, is_fresh: bool) -> None:
        self._step, self._waiting, self._case_s, self._is_fresh = step, waiting, case_s, is_fresh
        self._can_start = True

    def drive(self) -> None:
        """Run cases in one worker after the other until none waits, or no time is left."""
        worker: subprocess.Popen[str] | None = None
        while self._can_start and self._step.seconds_left() > 2:
            worker = worker or self._start()
            try:
                name = self._waiting.popleft() if worker else ""
            except IndexError:
                break
            if worker is None or not self._run(worker, name) or self._is_fresh:
                worker = worker and _end(worker)
        if worker is not None:
            _end(worker)

    def _start(self) -> "subprocess.Popen[str] | None":
        step = self._step
        command = [sys.executable, "-m", f"gpu.steps.{step.name}", str(step.folder), "--worker"]
        command += ["--device", step.device, "--seconds", f"{step.seconds_left():.1f}"]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if _answer(worker, min(self.START_S, step.seconds_left())) == READY:
            return worker
        _end(worker)
        if self._can_start and step.seconds_left() > 2:
            step.fail("start of a worker", f"it ended with {worker.returncode} before its first case: see log.txt")
        self._can_start = False
        return None

    def _run(self, worker: "subprocess.Popen[str]", name: str) -> bool:
        """Run a case; return whether the worker can run another one."""
        limit = min(self._case_s, self._step.seconds_left())
        assert worker.stdin is not None
        worker.stdin.write(name + "\n")
        worker.stdin.flush()
        answer = _answer(worker, limit)
        if answer is None:
            cause = "it hangs: no answer within" if limit == self._case_s else "no time was left: it was stopped after"
            self._step.fail(name, f"{cause} {limit:.0f} s")
        elif not answer:
            self._step.fail(name, f"its process ended with {worker.wait()}: see log.txt")
        return answer == DONE


def _answer(worker: "subprocess.Popen[str]", seconds: float) -> str | None:
    """Return the next line of a worker, "" if it has ended, or None after `seconds`."""
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], max(seconds, 0.0))
    return worker.stdout.readline() if ready else None


def _end(worker: "subprocess.Popen[str]") -> None:
    worker.kill()
    worker.communicate()


def _serve(step: Step, cases: Mapping[str, Case]) -> None:
    """Run the cases that the parent names, and end this process without a teardown, which could hang."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a case prints is for the log
    print(READY, end="", file=answers, flush=True)
    for line in sys.stdin:
        answer, name = DONE, line.removesuffix("\n")
        try:
            cases[name](step)
            _synchronize(step)
        except Exception as error:
            logging.exception("The case %s failed.", name)
            step.fail(name, error)
            answer = POISONED if any(word in f"{type(error).__name__} {error}" for word in POISON) else DONE
        print(answer, end="", file=answers, flush=True)
    os._exit(0)


def _synchronize(step: Step) -> None:
    if step.is_gpu:
        import torch

        torch.cuda.synchronize()
