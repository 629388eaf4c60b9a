"""Records the kernel calls of a computation, to replay them without the Python code that runs between them.

While a computation is recorded, its outputs (`torch.empty`) come from a pool whose memory stays, so that the addresses
in the calls stay valid. A guard watches torch's operators: the calls replace the computation only if each operator
merely returned a view. It cannot see kernels' inputs that torch makes without its dispatcher, such as
`torch.from_numpy`: code that calls kernels must not pass temporary memory of its own to them.
"""

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_float, c_void_p
from functools import partial
from itertools import pairwise
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Kernel = Callable[..., None]

_ALIGNMENT = 64
_REGION_BYTES = 64 << 20
_MOST_CALLS = 1024  # of one part of a recording
_CALL = np.dtype([("kernel", "i8"), ("arguments", "i8", 11), ("scale", "f4")], align=True)  # `struct RecordedCall`


class NativeCalls:
    """Calls of native kernels, which one call of `octavo_replay` repeats.

    The list has its own memory mapping: on the C heap it fragmented the memory of logits, which cost a gigabyte.
    """

    def __init__(self, replay: Kernel) -> None:
        self._replay = replay
        self._calls = np.frombuffer(mmap(-1, _MOST_CALLS * _CALL.itemsize), _CALL)
        self.count = 0

    def append(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        call, self.count = self._calls[self.count], self.count + 1
        typed = list(zip(arguments, kernel.argtypes, strict=True))
        numbers = [x or 0 for x, kind in typed if kind is not c_float]
        call["kernel"], call["arguments"][: len(numbers)] = ctypes.cast(kernel, c_void_p).value, numbers
        call["scale"] = sum(x for x, kind in typed if kind is c_float)

    def __call__(self) -> None:
        self._replay(self._calls.ctypes.data, self.count)


class Recording:
    """Kernel calls in order. `refused`: the first operator that cannot be replayed, if any."""

    def __init__(self) -> None:
        self.refused: str | None = None
        self._parts: list[Callable[[], None]] = []

    def append(self, kernel: Kernel, arguments: tuple[Any, ...], replay: Kernel | None) -> None:
        if replay is None:
            self._parts.append(partial(kernel, *arguments))
            return
        part = self._parts[-1] if self._parts else None
        if not isinstance(part, NativeCalls) or part.count == _MOST_CALLS:
            part = NativeCalls(replay)
            self._parts.append(part)
        part.append(kernel, arguments)

    @property
    def has_exchanged(self) -> bool:
        """Return True if a call was a collective operation; all other calls are native."""
        return not all(isinstance(part, NativeCalls) for part in self._parts)

    def replay(self) -> None:
        for part in self._parts:
            part()


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


def recordable(kernel: Kernel, replay: Kernel | None = None) -> Kernel:
    """Wrap a kernel so that each call is also listed in the recording in progress.

    `replay`: the `octavo_replay` of a native kernel's library.
    """

    def call(*arguments: Any) -> None:
        recording = _current.get()
        if recording is not None:
            recording.append(kernel, arguments, replay)
        kernel(*arguments)

    return call


@contextmanager
def record(pool: "Pool", *inputs: Tensor) -> Iterator[Recording]:
    """Record the kernel calls of the block. `inputs`: tensors beside the pool's that keep their addresses."""
    recording = Recording()
    token = _current.set(recording)
    try:
        with _Guard(recording, pool, {_address(x) for x in inputs}):
            yield recording
    finally:
        _current.reset(token)


class Pool:
    """Memory for outputs. A piece returns to the pool when the last view of its tensor is gone.

    All recordings use the same memory from its start, so it grows to the size of the largest recording. The system
    commits pages when they are first written. Raises MemoryError if the system refuses more memory.
    """

    def __init__(self) -> None:
        self._regions: list[_Region] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        piece = next((part for region in self._regions if (part := region.take(num_bytes)) is not None), None)
        if piece is None:
            self._regions.append(_Region(max(num_bytes, _REGION_BYTES)))
            piece = self._regions[-1].take(num_bytes)
            assert piece is not None
        return torch.from_numpy(piece).view(dtype).view(shape)

    def locate(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that recreates `x` (contiguous) from its address; None if the pool lacks `x`."""
        if not x.is_contiguous():
            return None
        bounds = ((region, x.data_ptr() - region.address) for region in self._regions)
        for region, begin in bounds:
            if 0 <= begin <= region.memory.nbytes - x.nbytes:
                return partial(region.view, begin, x.dtype, x.shape)
        return None

    def contains(self, address: int) -> bool:
        return any(0 <= address - region.address < region.memory.nbytes for region in self._regions)

    @property
    def used_bytes(self) -> int:
        """The most memory that pieces have taken at a time."""
        return sum(region.peak for region in self._regions)

    def fill(self, byte: int) -> None:
        """Overwrite the memory that pieces have taken, as no replay may depend on its contents."""
        for region in self._regions:
            region.memory[: region.peak] = byte


class _Region:
    """One run of memory, from which pieces are taken at the first gap that is large enough."""

    def __init__(self, num_bytes: int) -> None:
        raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
        self.memory: npt.NDArray[np.uint8] = raw[-raw.ctypes.data % _ALIGNMENT :]
        self.address = int(self.memory.ctypes.data)
        self.peak = 0
        self._pieces: dict[int, int] = {}  # begin: end

    def view(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        taken = sorted(self._pieces.copy().items())  # a copy: a piece may return at any time
        gaps = pairwise([(0, 0), *taken, (self.memory.nbytes, 0)])
        needed = max(1, num_bytes)  # so that no two pieces begin at one address
        begin = next((end for (_, end), (after, _) in gaps if after - end >= needed), None)
        if begin is None:
            return None
        self._pieces[begin] = -(-(begin + needed) // _ALIGNMENT) * _ALIGNMENT
        self.peak = max(self.peak, begin + num_bytes)
        piece = self.memory[begin : begin + num_bytes]
        weakref.finalize(piece, self._pieces.pop, begin).atexit = False
        return piece


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the memory of `torch.empty` from the pool; refuses other operators, except views of known memory."""

    def __init__(self, recording: Recording, pool: Pool, inputs: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._pool, self._inputs = recording, pool, inputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and _is_plain(kwargs):
            return self._pool.empty(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        result = func(*args, **kwargs)
        if self._recording.refused is None and not self._is_view(func, args, result):
            self._recording.refused = str(func)
        return result

    def _is_view(self, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        sources = [x for x in args if isinstance(x, Tensor)]
        results = result if isinstance(result, (list, tuple)) else [result]
        if func._schema.is_mutable or len(sources) != 1 or not all(isinstance(x, Tensor) for x in results):
            return False
        source = _address(sources[0])
        is_known = source in self._inputs or self._pool.contains(source)
        return is_known and all(_address(x) == source for x in results)


def _is_plain(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return (device is None or device.type == "cpu") and kwargs.get("memory_format") is None


def _address(x: Tensor) -> int:
    """Return the address of the tensor's storage; 0 if it has none, as in oneDNN's layout."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0
