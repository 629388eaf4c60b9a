"""Counts the work of Python code in steps: lines that run and calls of functions, of C functions, too."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Steps:
    """`count`: lines and calls so far. It does not depend on the speed of the machine."""

    def __init__(self) -> None:
        self.count = 0

    def trace_line(self, frame: FrameType, event: str, argument: Any) -> "Any":
        self.count += 1
        return self.trace_line

    def trace_call(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event == "c_call"


@contextmanager
def count_steps() -> Iterator[Steps]:
    """Count the steps of this thread within the block."""
    steps = Steps()
    trace, profile = sys.gettrace(), sys.getprofile()
    sys.settrace(steps.trace_line)
    sys.setprofile(steps.trace_call)
    try:
        yield steps
    finally:
        sys.settrace(trace)
        sys.setprofile(profile)
