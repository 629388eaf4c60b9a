"""Buffers that are reused across steps: one per name, grown when needed, so that steady-state steps do not allocate."""

import math

import torch
from torch import Tensor

_GROWTH = 1.25


class Scratch:
    """Named buffers. Their contents are undefined between uses; each name has one user at a time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def release(self) -> None:
        self._buffers.clear()

    def get_buffer(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            grown = size if buffer is None else max(size, int(buffer.numel() * _GROWTH))
            buffer = self._buffers[name] = torch.empty(grown, dtype=self._dtype)
        return buffer[:size].view(shape)
