"""Memory for the outputs of recorded steps, whose addresses stay valid: `Pool`."""

import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64
_REGION_BYTES = 64 << 20


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
        region = self._region(x.data_ptr()) if x.is_contiguous() else None
        return None if region is None else partial(region.view, x.data_ptr() - region.address, x.dtype, x.shape)

    def alias(self, x: Tensor) -> Tensor:
        """Return a tensor over the memory of `x`, a view of the pool, that does not keep this memory."""
        storage = x.untyped_storage().data_ptr()  # `x.data_ptr()` is 0 if `x` is empty
        region = self._region(storage)
        assert region is not None, "a tensor outside the pool"
        whole = region.memory[: region.memory.nbytes // x.dtype.itemsize * x.dtype.itemsize]
        offset = (storage - region.address) // x.dtype.itemsize + x.storage_offset()
        return torch.from_numpy(whole).view(x.dtype).as_strided(x.shape, x.stride(), offset)

    def contains(self, address: int) -> bool:
        return self._region(address) is not None

    @property
    def used_bytes(self) -> int:
        """The most memory that pieces have taken at a time."""
        return sum(region.peak for region in self._regions)

    def fill(self, byte: int) -> None:
        """Overwrite the memory that pieces have taken, as no replay may depend on its contents."""
        for region in self._regions:
            region.memory[: region.peak] = byte

    def _region(self, address: int) -> "_Region | None":
        return next((region for region in self._regions if region.contains(address)), None)


class _Region:
    """One run of memory, from which pieces are taken at the first gap that is large enough."""

    def __init__(self, num_bytes: int) -> None:
        raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
        self.memory: npt.NDArray[np.uint8] = raw[-raw.ctypes.data % _ALIGNMENT :]
        self.address = int(self.memory.ctypes.data)
        self.peak = 0
        self._pieces: dict[int, int] = {}  # begin: end

    def contains(self, address: int) -> bool:
        return 0 <= address - self.address < self.memory.nbytes

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
