"""Ctrl-C between two steps instead of inside one, where it would leave scheduler and runner half way."""

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
            raise KeyboardInterrupt  # the second Ctrl-C doesn't wait
        self._is_set = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if one came in since the start."""
        if self._is_set:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[PendingInterrupt]:
    """Where a program handles SIGINT itself, or in another thread than the main one, nothing is changed."""
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
