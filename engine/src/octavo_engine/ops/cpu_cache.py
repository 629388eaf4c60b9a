"""The KV cache in host memory: two tensors per layer, blocks first, so that copy and swap see opaque rows of bytes.

Pages are committed when first written (calloc), so a generous cache costs nothing until it is used. A block that is
started but not filled is zeroed first: positions that no one wrote then hold finite numbers, which a mask can hide.
"""

import numpy as np
import torch
from torch import Tensor

from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.scratch import Scratch

_CHUNK_BLOCKS = 256  # swapped at a time: bounds the staging copies


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that occupy memory only where they are written."""
    *head, last = shape
    raw = np.zeros((*head, last * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


class PagedCache:
    """K and V of every layer as [blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> None:
        self.specs = specs
        self.block_size = block_size
        self.dtype = dtype
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def allocate(self, num_blocks: int) -> None:
        for spec in self.specs:
            shape = (num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
            self.keys.append(lazy_zeros(shape, self.dtype))
            self.values.append(lazy_zeros(shape, self.dtype))

    def bytes_per_block(self) -> int:
        return sum(2 * self.block_size * s.num_kv_heads * s.head_dim * self.dtype.itemsize for s in self.specs)

    def write(self, layer_idx: int, k: Tensor, v: Tensor, slots: Tensor, started_blocks: Tensor) -> None:
        """`slots` [tokens] int64, all valid; `started_blocks`: those begun but not filled by this write."""
        for cache, new in ((self.keys[layer_idx], k), (self.values[layer_idx], v)):
            if len(started_blocks):
                cache.index_fill_(0, started_blocks, 0)
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))

    def gather(self, layer_idx: int, blocks: Tensor, num_seqs: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """`blocks` [num_seqs * n] int64 -> K and V [num_seqs, kv_heads, n * block_size, head_dim], views of scratch."""
        found = []
        for name, cache in (("keys", self.keys[layer_idx]), ("values", self.values[layer_idx])):
            rows = scratch.take(name, len(blocks), cache[0].numel())
            torch.index_select(cache.view(len(cache), -1), 0, blocks, out=rows)
            found.append(rows.view(num_seqs, -1, *cache.shape[2:]).transpose(1, 2))
        return found[0], found[1]

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
        """Each cache tensor as rows of bytes, beside the columns of `host` that hold its part of a block."""
        pairs, offset = [], 0
        for cache in (*self.keys, *self.values):
            raw = cache.view(len(cache), -1).view(torch.uint8)
            pairs.append((host[:, offset : offset + raw.shape[1]], raw))
            offset += raw.shape[1]
        return pairs
