"""Defers Ctrl-C to the end of a step; inside a step it would leave the scheduler and the runner inconsistent."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class PendingInterrupt:
    def __init__(self) -> None:
        self._is_set = False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt  # a second Ctrl-C interrupts the step
        self._is_set = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since `deferred_interrupt` began."""
        if self._is_set:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[PendingInterrupt]:
    """Defer SIGINT in the main thread. A program's own SIGINT handler is kept; other threads see no change."""
    pending = PendingInterrupt()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pending
        return
    signal.signal(signal.SIGINT, pending.on_signal)
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
