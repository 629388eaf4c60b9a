"""CUDA graphs, events and pinned memory. No other module names them; tests replace them by stand-ins without a GPU."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo_engine.wire.errors import first_line

_LOGGER = logging.getLogger(__name__)
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_TRITON_OUT_OF_MEMORY = "[CUDA]: out of memory"  # the end of Triton's error, which has no code

#: Runs a forward pass; returns a function that repeats its launches, and its output, which each repetition overwrites.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


#: Overwrites a tensor on the device with a tensor on the host, without waiting for the copy.
Overwrite = Callable[[Tensor, Tensor], None]


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and str(error).endswith(_TRITON_OUT_OF_MEMORY)


class PinnedCopy:
    """Copies host tensors to a GPU by pinned memory, which torch keeps until the copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, True

    def __call__(self, values: Tensor) -> Tensor:
        values = self._pinned(values)
        return values.to(self._device, non_blocking=self._pins)

    def overwrite(self, target: Tensor, values: Tensor) -> None:
        """Copy to a tensor of the GPU."""
        values = self._pinned(values)
        target.copy_(values, non_blocking=self._pins)

    def _pinned(self, values: Tensor) -> Tensor:
        """Return the values in pinned memory, or as they are if the system refuses it."""
        if self._pins:
            try:
                return values.pin_memory()
            except RuntimeError as error:
                self._pins = False
                _LOGGER.warning(
                    "inputs of steps are not pinned, so copies to the GPU are slower: %s", first_line(error)
                )
        return values


class PinnedFetch:
    """Copies results to pinned memory, which torch uses again only when the copy is done and its tensor is gone."""

    def __init__(self) -> None:
        self._pins = True

    def __call__(self, values: Tensor) -> Callable[[], Tensor]:
        host = self._allocate(values)
        if host is None:
            return values.cpu
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def wait() -> Tensor:
            event.synchronize()
            return host

        return wait

    def _allocate(self, values: Tensor) -> Tensor | None:
        if self._pins:
            try:
                return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                text = "results of steps are not pinned, so copies from the GPU are slower: %s"
                _LOGGER.warning(text, first_line(error))
        return None


class EventTimer:
    """A `Timer` of the work of the current stream."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3


class GraphCapture:
    """Captures graphs whose temporary memory is shared, so that only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        work()  # kernels compile and libraries allocate their workspaces, which a capture does not allow
        graph = torch.cuda.CUDAGraph()
        # An adapter's thread may copy to the GPU meanwhile, which the mode "global" takes for an error of the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        self._pool = self._pool or graph.pool()
        return graph.replay, output
