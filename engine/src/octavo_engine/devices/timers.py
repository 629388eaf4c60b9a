"""Timers of the device's work, by which the costs of a step are measured."""

import time
from typing import Protocol


class Timer(Protocol):
    """Measures the device's work that is submitted between the timer's creation and `stop`."""

    def stop(self) -> None: ...

    def seconds(self) -> float:
        """Wait until the device has finished that work; return the time that it took."""
        ...


class HostTimer:
    """A timer of work that is done when its calls return."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began
