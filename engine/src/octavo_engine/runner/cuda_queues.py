"""CUDA graphs. No other module names them; tests replace `capture` by a function that needs no GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Runs a forward pass; returns a function that repeats its launches, and its output, which each repetition overwrites.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class GraphCapture:
    """Captures graphs whose temporary memory is shared, so that only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        work()  # kernels compile and libraries allocate their workspaces, which a capture does not allow
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        self._pool = self._pool or graph.pool()
        return graph.replay, output
