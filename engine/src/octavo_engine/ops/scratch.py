"""Buffers that outlive a step: one per name, grown when needed, so that a steady state allocates nothing."""

import math

import torch
from torch import Tensor

_GROWTH = 1.25


class Scratch:
    """Contents are undefined between uses; one user per name at a time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def get_buffer(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            grown = size if buffer is None else max(size, int(buffer.numel() * _GROWTH))
            buffer = self._buffers[name] = torch.empty(grown, dtype=self._dtype)
        return buffer[:size].view(shape)
