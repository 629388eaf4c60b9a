"""Copies of a step's inputs to the device and of its results to the host; timers of the device's work."""

import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

#: Copies a host tensor to the device, without waiting for the copy.
Copy = Callable[[Tensor], Tensor]
#: Starts to copy a tensor to the host; returns a function that waits for the copy and returns the host tensor.
Fetch = Callable[[Tensor], Callable[[], Tensor]]


def keep(values: Tensor) -> Tensor:
    """Stand in for `Copy` where the device is the host."""
    return values


def fetch_now(values: Tensor) -> Callable[[], Tensor]:
    """Stand in for `Fetch` where the device is the host."""
    return lambda: values


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
