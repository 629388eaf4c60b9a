"""The KV cache in CPU memory: two tensors per layer, blocks first, so that copy and swap handle opaque rows of bytes.

Pages are committed when first written (calloc), so a large cache uses no memory until it is used. A block that a
write starts but does not fill is zeroed first: unwritten positions then hold finite numbers, which a mask can hide.
"""

import math

import numpy as np
import torch
from torch import Tensor

from octavo_engine.ops.attention import LayerKVSpec

Shape = tuple[int, ...]

_CHUNK_BLOCKS = 256  # blocks swapped at a time, which bounds the staging copies
_GROWTH = 1.25


class Scratch:
    """Named buffers that are reused across steps and grow when needed. Their contents are undefined between uses; each
    name has one user at a time."""

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


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that occupy memory only where they are written."""
    *head, last = shape
    raw = np.zeros((*head, last * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


class BlockStore:
    """K and V tensors of every layer, blocks first; a subclass or the owner defines the layout within a block.

    `shapes`: the shapes of one block of K and of V, per layer.
    """

    def __init__(self, shapes: list[tuple[Shape, Shape]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._shapes = shapes

    def allocate(self, num_blocks: int) -> None:
        self.keys = [lazy_zeros((num_blocks, *key), self.dtype) for key, _ in self._shapes]
        self.values = [lazy_zeros((num_blocks, *value), self.dtype) for _, value in self._shapes]

    def release(self) -> None:
        self.keys, self.values = [], []

    def bytes_per_block(self) -> int:
        return sum(math.prod(shape) * self.dtype.itemsize for shapes in self._shapes for shape in shapes)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, destination = torch.tensor(pairs, dtype=torch.int64).T
        for cache in (*self.keys, *self.values):
            cache.index_copy_(0, destination, cache.index_select(0, source))

    def swap_out(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        for chunk in torch.split(torch.tensor(pairs, dtype=torch.int64).view(-1, 2), _CHUNK_BLOCKS):
            blocks, rows = chunk.T
            for columns, cache in self._columns(host):
                columns.index_copy_(0, rows, cache.index_select(0, blocks))

    def swap_in(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        for chunk in torch.split(torch.tensor(pairs, dtype=torch.int64).view(-1, 2), _CHUNK_BLOCKS):
            rows, blocks = chunk.T
            for columns, cache in self._columns(host):
                cache.index_copy_(0, blocks, columns.index_select(0, rows))

    def _columns(self, host: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pair each cache tensor, as rows of bytes, with the columns of `host` that hold its part of a block."""
        pairs, offset = [], 0
        for cache in (*self.keys, *self.values):
            raw = cache.view(len(cache), -1).view(torch.uint8)
            pairs.append((host[:, offset : offset + raw.shape[1]], raw))
            offset += raw.shape[1]
        return pairs


class PagedCache(BlockStore):
    """Blocks of [block_size, kv_heads, head_dim], a layout that torch gathers fast."""

    def __init__(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> None:
        shapes = [(block_size, spec.num_kv_heads, spec.head_dim) for spec in specs]
        super().__init__([(shape, shape) for shape in shapes], dtype)

    def write(self, layer_idx: int, k: Tensor, v: Tensor, slots: Tensor, started_blocks: Tensor) -> None:
        """Write K and V. `slots` [tokens] int64, all valid; `started_blocks`: started but not filled by this write."""
        for cache, new in ((self.keys[layer_idx], k), (self.values[layer_idx], v)):
            if len(started_blocks):
                cache.index_fill_(0, started_blocks, 0)
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))

    def gather(self, layer_idx: int, blocks: Tensor, num_seqs: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Copy `blocks` [num_seqs * n] to scratch; return K and V [num_seqs, kv_heads, n * block_size, head_dim]."""
        parts = []
        for name, cache in (("keys", self.keys[layer_idx]), ("values", self.values[layer_idx])):
            rows = scratch.get_buffer(name, len(blocks), cache[0].numel())
            torch.index_select(cache.view(len(cache), -1), 0, blocks, out=rows)
            parts.append(rows.view(num_seqs, -1, *cache.shape[2:]).transpose(1, 2))
        return parts[0], parts[1]
