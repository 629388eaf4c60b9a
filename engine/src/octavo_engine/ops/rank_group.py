"""`Group`: the ranks that divide each layer of a model among themselves, and their collective operations.

Ranks are processes of one or several hosts, or threads. Each has a `ProcessGroupGloo` that is not registered in
`torch.distributed`, so a process may belong to several groups. gloo listens on one address only; without other hosts,
that is a loopback address. The ranks find each other through a `MessageStore`. On GPUs, NCCL exchanges the model's
tensors, and gloo exchanges tensors in host memory.
"""

import ctypes
import fcntl
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from octavo_engine.ops.message_store import MEETING_TIMEOUT, named
from octavo_engine.ops.recording import recordable
from octavo_engine.wire.errors import GroupBroken, StartupError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # the request for the address of an interface
_LOGGER = logging.getLogger(__name__)


class GpuCollectives:
    """Collective operations of one rank on GPU tensors, by NCCL. Operations are queued on the GPU.

    This class was only checked against torch's source: it has never run on GPUs. With "blocking wait", torch does not
    end the process if an operation is late: `wait` raises an error, as with gloo. `nccl`: a `ProcessGroupNCCL`. All
    calls raise RuntimeError if the ranks do not make the same calls.

    `synchronize` makes the GPU stream of the model wait for an operation. `Work.wait` makes the host wait: it polls
    until the operation is done, and fails after the timeout of the process group.
    """

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl
        self._last: Any = None
        self._is_aborted = False

    def add_up(self, x: Tensor) -> None:
        """Queue an all-reduce (sum) of `x`, in place."""
        self._last = self._nccl.allreduce([x])
        self._last.synchronize()

    def gather(self, parts: list[Tensor], x: Tensor, options: Any) -> None:
        """Copy each rank's `x` to `parts` on rank 0; wait until this and all earlier operations are done."""
        self._last = self._nccl.gather([parts] if parts else [], [x], options)
        self.wait()

    def wait(self) -> None:
        """Wait until the operations are done. Other ways to wait for the GPU have no timeout: they may hang."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        if self._is_aborted:  # it ends a wait without error, with incomplete values
            raise RuntimeError("another rank is gone")

    def abort(self) -> None:
        """Abort operations on the GPU that wait for a rank whose process has ended. Any thread may call this."""
        self._is_aborted = True
        try:
            self._nccl.abort()
        except RuntimeError as error:
            _LOGGER.warning("operations on the GPU cannot be ended: %s", error)


def find_interface(address: str) -> str | None:
    """Return the network interface that has an address, of IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def connect_gpus(
    store: Any, rank: int, size: int, timeout: timedelta, device: torch.device, address: str = LOOPBACK
) -> GpuCollectives:
    """Connect to the other ranks, which must call this, too. Raises RuntimeError if NCCL cannot connect the GPUs.

    The current device must be `device`. NCCL connects the processes over the interface of `address`.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    if (interface := find_interface(address)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    nccl = cast("Any", dist).ProcessGroupNCCL  # torch's types lack it
    options = nccl.Options()
    options._timeout = timeout
    collectives = GpuCollectives(nccl(named(store, "nccl"), rank, size, options))
    probe = torch.ones(1, device=device)  # NCCL connects at the first operation, and the store does not last
    collectives.add_up(probe)
    collectives.wait()
    if probe.item() != size:
        raise RuntimeError(f"NCCL adds {size} ones up to {probe.item():g}")
    return collectives


class Group:
    """Rank `rank` of `size`. `collectives`: None for a group that does not communicate: it has one rank, or serves only
    to divide sizes. `timeout`: limit of each operation. `gpus`: operations on GPU tensors, if any.

    All ranks must make the same calls in the same order. A call raises GroupBroken if a rank has ended or is late. On
    GPUs only `gather` and `wait` raise it, because other calls return before the GPU has finished them.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        collectives: Any = None,
        timeout: timedelta = MEETING_TIMEOUT,
        gpus: GpuCollectives | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._collectives, self._timeout, self._gpus = collectives, timeout, gpus
        self._add_up = recordable(self._add_up_memory)
        self._exchange = recordable(self._exchange_memory)
        self.exchanged_bytes = {"send": 0, "recv": 0}

    def shares(self, count: int, unit: int = 1) -> list[range]:
        """Divide `count` items among the ranks in multiples of `unit`; only the last unit may be incomplete."""
        units = -(-count // unit)
        bounds = [min(count, units * rank // self.size * unit) for rank in range(self.size + 1)]
        return [range(first, last) for first, last in pairwise(bounds)]

    def share(self, count: int, unit: int = 1) -> range:
        return self.shares(count, unit)[self.rank]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x`, contiguous, over the ranks, in place; all ranks get the same bits."""
        if self.size > 1:
            assert x.is_contiguous()
            if self._gpus is None:
                self._add_up(x.data_ptr(), x.nbytes, x.dtype)
            else:
                self._run("all-reduce", partial(self._gpus.add_up, x))
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' tensors, which must have equal shapes, on rank 0; an empty list on other ranks."""
        if self.size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = self._options(dist.GatherOptions())
        options.rootRank = 0
        x = x.contiguous()
        if self._gpus is None:
            self._run("gather", lambda: self._collectives.gather([parts] if parts else [], [x], options).wait())
        else:
            self._run("gather", partial(self._gpus.gather, parts, x, options))
        return parts

    def wait(self) -> None:
        """Wait until the GPU has done all operations; call this before any other wait for a step's results."""
        if self._gpus is not None:
            self._run("all-reduce", self._gpus.wait)

    def abort(self) -> None:
        """Abort operations on the GPU that wait for a rank whose process has ended. Any thread may call this."""
        if self._gpus is not None:
            self._gpus.abort()

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace `x`, contiguous and in host memory, by rank 0's `x`, in place."""
        if self.size > 1:
            options = self._options(dist.BroadcastOptions())
            options.rootRank = options.rootTensor = 0
            self._run("broadcast", lambda: self._collectives.broadcast([x], options).wait())
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send `x`, a contiguous tensor in host memory, to rank `to`; wait until that rank has received it."""
        assert x.is_contiguous()
        self._exchange("send", x.data_ptr(), x.nbytes, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Replace `x`, contiguous and in host memory, by the tensor that rank `source` sends."""
        assert x.is_contiguous()
        self._exchange("recv", x.data_ptr(), x.nbytes, source)
        return x

    def _exchange_memory(self, operation: str, address: int, num_bytes: int, other: int) -> None:
        """Send or receive memory (maybe 0 bytes) by address, as `_add_up_memory`."""
        x = _memory(address, num_bytes, torch.uint8) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._run(operation, lambda: getattr(self._collectives, operation)([x], other, 0).wait(self._timeout))
        self.exchanged_bytes[operation] += num_bytes

    def _add_up_memory(self, address: int, num_bytes: int, dtype: torch.dtype) -> None:
        """Sum memory at an address over all ranks. Recorded steps repeat this call, and may refer to addresses only."""
        x = _memory(address, num_bytes, dtype)
        options = self._options(dist.AllreduceOptions())
        self._run("all-reduce", lambda: self._collectives.allreduce([x], options).wait())

    def close(self) -> None:
        """Close the connections to the other ranks, so that their operations with this rank fail at once."""
        self.abort()
        self._collectives = None

    def _options(self, options: Any) -> Any:
        options.timeout = self._timeout
        return options

    def _run(self, name: str, operation: Callable[[], Any]) -> None:
        assert self._collectives is not None, "this group only plans, or is closed"
        try:
            operation()
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank} of {self.size}: the {name} of the ranks failed: {error}") from error


def _memory(address: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)


def open_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    meeting_timeout: timedelta = MEETING_TIMEOUT,
    *,
    name: str = "all",
    address: str = LOOPBACK,
    gpu: torch.device | None = None,
) -> Group:
    """Connect to the other ranks, which open a group of the same name. `store`: a `MessageStore`. `timeout`: limit of
    each operation. `address`: this host's address on which gloo listens. `gpu`: the model's device; None: the CPU.

    Raises GroupBroken if a rank does not connect within `meeting_timeout`, StartupError if the host lacks `address`.
    """
    gloo = cast("Any", dist.ProcessGroupGloo)  # torch's types lack its options
    options, store = gloo._Options(), named(store, name)
    try:
        options._devices = [gloo.create_device(hostname=address)]
    except RuntimeError as error:
        raise StartupError(_describe_address(rank, size, address)) from error
    options._timeout = meeting_timeout
    try:
        collectives = gloo(store, rank, size, options)
        _check_peers(collectives, store, rank, size, meeting_timeout)
        gpus = None if gpu is None else connect_gpus(store, rank, size, timeout, gpu, address)
        return Group(rank, size, collectives, timeout, gpus)
    except (RuntimeError, TimeoutError) as error:
        raise GroupBroken(f"rank {rank} of {size} cannot connect to the other ranks: {error}") from error


def _describe_address(rank: int, size: int, address: str) -> str:
    if address != LOOPBACK:
        return f"rank {rank} of {size}: {address} is no address of this host: set VLLM_HOST_IP to one of its addresses."
    what = f"rank {rank} of {size}: the ranks connect over the loopback interface lo, which has no address here"
    return f"{what}: bring it up (ip link set lo up), or use one rank."


def _check_peers(collectives: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Send a random number to each rank over gloo, and compare it with the number in the store: gloo itself accepts any
    process that connects first.

    Raises RuntimeError if another process is in the place of a rank.
    """
    number = secrets.token_bytes(16)
    store.set(f"number-{rank}", number)
    sent = torch.frombuffer(bytearray(number), dtype=torch.uint8)
    received = {peer: torch.zeros_like(sent) for peer in range(size) if peer != rank}
    works = [collectives.recv([x], peer, 0) for peer, x in received.items()]
    works += [collectives.send([sent], peer, 0) for peer in received]
    for work in works:
        work.wait(timeout)
    for peer, x in received.items():
        if not secrets.compare_digest(bytes(x.tolist()), store.get(f"number-{peer}")):
            raise RuntimeError(f"a process that is not rank {peer} has connected in its place")
