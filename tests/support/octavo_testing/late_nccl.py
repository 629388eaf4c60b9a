"""A stand-in for `ProcessGroupNCCL` whose ranks are threads without GPUs, and whose works are as late as a GPU's.

An operation is done when the stream or the host waits for it. It is gloo that does it, so its results are real.
"""

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, cast

import pytest
import torch.distributed as dist
from torch import Tensor


class LateWork:
    def __init__(self, group: "LateNccl", start: Callable[[], Any]) -> None:
        self._group, self._start, self._is_done = group, start, False

    def synchronize(self) -> None:
        """Let the stream wait. A lost rank is not noticed: only the host's wait has a timeout."""
        if not self._is_done and not self._group.is_stuck:
            self._start().wait()
            self._is_done = True

    def wait(self) -> None:
        if self._group.is_stuck:
            raise RuntimeError("Watchdog caught collective operation timeout")
        self.synchronize()


class LateNccl:
    """`is_stuck`: a rank is gone, which this one cannot know before it waits."""

    class Options:
        _timeout = timedelta(0)

    made: ClassVar[list["LateNccl"]] = []

    def __init__(self, store: Any, rank: int, size: int, options: "LateNccl.Options") -> None:
        gloo = cast("Any", dist.ProcessGroupGloo)
        own = gloo._Options()
        own._devices = [gloo.create_device(interface="lo")]
        own._timeout = options._timeout
        self._gloo = gloo(store, rank, size, own)
        self.is_stuck = self.is_aborted = False
        LateNccl.made.append(self)

    def allreduce(self, tensors: list[Tensor]) -> LateWork:
        return LateWork(self, lambda: self._gloo.allreduce(tensors))

    def gather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any) -> LateWork:
        return LateWork(self, lambda: self._gloo.gather(parts, tensors, options))

    def abort(self) -> None:
        self.is_aborted = True


@contextmanager
def late_nccl() -> Any:
    """Let groups that open meanwhile use this class; yield the list of those made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupNCCL", LateNccl, raising=False)
        patch.setattr(LateNccl, "made", [])
        patch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
        patch.setenv("NCCL_SOCKET_IFNAME", "eth7")
        yield LateNccl.made
