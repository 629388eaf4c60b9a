"""Copies between host and device: a step's inputs go to the device, its results come back to the host."""

from collections.abc import Callable

from torch import Tensor

#: Copies a tensor of the host to the device, and does not wait for it.
Copy = Callable[[Tensor], Tensor]
#: Starts to copy a tensor to the host. The function that it returns waits for the copy and returns it.
Fetch = Callable[[Tensor], Callable[[], Tensor]]


def keep(values: Tensor) -> Tensor:
    """Stand in for `Copy` where the device is the host."""
    return values


def fetch_now(values: Tensor) -> Callable[[], Tensor]:
    """Stand in for `Fetch` where the device is the host."""
    return lambda: values
