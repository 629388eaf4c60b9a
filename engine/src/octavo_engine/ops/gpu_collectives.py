"""Collective operations on tensors of GPUs, by NCCL. They are queued on the GPU, so the host must `wait` for them.

Torch's source is all that these calls were checked against: they have never run on GPUs. With its "blocking wait",
torch starts no thread that ends the process when an operation is late: `wait` raises an error, as with gloo.
"""

import logging
import os
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

_LOGGER = logging.getLogger(__name__)


class GpuCollectives:
    """Operations of one rank. `nccl`: a `ProcessGroupNCCL`. All calls raise RuntimeError if the ranks are not in step.

    The model's stream waits for an operation by `synchronize`; the host does by `Work.wait`, which polls until the
    operation is done, and fails after the timeout of the process group.
    """

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl
        self._last: Any = None
        self._is_aborted = False

    def add_up(self, x: Tensor) -> None:
        """Queue an addition of `x` over the ranks, in place."""
        self._last = self._nccl.allreduce([x])
        self._last.synchronize()

    def gather(self, parts: list[Tensor], x: Tensor, options: Any) -> None:
        """Copy `x` of all ranks to the `parts` of rank 0, and wait until all earlier operations are done, too."""
        self._last = self._nccl.gather([parts] if parts else [], [x], options)
        self.wait()

    def wait(self) -> None:
        """Wait until the operations are done; a wait for the GPU by other means would not end if a rank is gone."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        if self._is_aborted:  # which ends a wait, too, with the values as they are
            raise RuntimeError("another rank is gone")

    def abort(self) -> None:
        """End the operations that run on the GPU, on any thread: a rank that is gone never takes part in them."""
        self._is_aborted = True
        try:
            self._nccl.abort()
        except RuntimeError as error:
            _LOGGER.warning("operations on the GPU cannot be ended: %s", error)


def connect_gpus(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> GpuCollectives:
    """Connect to the other ranks, which call this, too. Raises RuntimeError if NCCL does not connect the GPUs.

    The current device must be `device`. NCCL connects the processes over the loopback interface.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    nccl, prefixed = cast("Any", dist).ProcessGroupNCCL, cast("Any", dist).PrefixStore  # torch's types lack both
    options = nccl.Options()
    options._timeout = timeout
    collectives = GpuCollectives(nccl(prefixed("nccl", store), rank, size, options))
    probe = torch.ones(1, device=device)  # NCCL connects at the first operation, and the store does not last
    collectives.add_up(probe)
    collectives.wait()
    if probe.item() != size:
        raise RuntimeError(f"NCCL adds {size} ones up to {probe.item():g}")
    return collectives
