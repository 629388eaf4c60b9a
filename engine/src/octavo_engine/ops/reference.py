"""The reference implementation of paged attention in plain torch, one sequence at a time, in fp32.

Tests compare every other backend with this one, so it is short and slow. It has the simplest layout: one K and one V
tensor per layer, [blocks, block_size, kv_heads, head_dim]. Only tests use it.
"""

from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from octavo_engine.ops.attention import AttendByParts, AttentionBatch, AttentionSpec, LayerKVSpec


def causal_mask(query_len: int, seq_len: int, window: int | None) -> Bool[Tensor, "query_len seq_len"]:
    """Return True where a query sees a key; the queries are the last `query_len` positions of the sequence."""
    query = torch.arange(seq_len - query_len, seq_len)[:, None]
    key = torch.arange(seq_len)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def attention_reference(
    spec: AttentionSpec,
    q: Float[Tensor, "query_len q_heads head_dim"],
    k: Float[Tensor, "seq_len kv_heads head_dim"],
    v: Float[Tensor, "seq_len kv_heads head_dim"],
) -> Float[Tensor, "query_len q_heads head_dim"]:
    group = spec.num_heads // spec.kv.num_kv_heads
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    mask = causal_mask(len(q), len(k), spec.kv.window).to(scores.device)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


class ReferenceBackend(AttendByParts):
    """`AttentionBackend` for tests, on any device."""

    def __init__(
        self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.specs = specs
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.caches: list[Float[Tensor, "kv blocks block_size kv_heads head_dim"]] = []

    def allocate(self, num_blocks: int) -> None:
        self.caches = [
            torch.zeros(2, num_blocks, self.block_size, s.num_kv_heads, s.head_dim, dtype=self.dtype).to(self.device)
            for s in self.specs
        ]

    def release(self) -> None:
        self.caches = []

    def bytes_per_block(self) -> int:
        return sum(2 * self.block_size * s.num_kv_heads * s.head_dim * self.dtype.itemsize for s in self.specs)

    def begin_step(self, batch: AttentionBatch) -> None:
        batch.private = None

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        cache = self.caches[spec.layer_idx]
        flat = cache.view(2, -1, *cache.shape[3:])
        written = batch.slots >= 0
        flat[0, batch.slots[written]] = k[written].to(self.dtype)
        flat[1, batch.slots[written]] = v[written].to(self.dtype)
        out = torch.zeros_like(q)
        for seq, (start, end) in enumerate(pairwise(batch.query_start.tolist())):
            seq_len = int(batch.seq_lens[seq])
            num_blocks = -(-seq_len // self.block_size)
            paged = cache[:, batch.block_tables[seq, :num_blocks].long()].flatten(1, 2)[:, :seq_len]
            if end > start:
                out[start:end] = attention_reference(spec, q[start:end], paged[0], paged[1])
        return out

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for cache in self.caches:
            for source, destination in pairs:
                cache[:, destination] = cache[:, source]

    def swap_out(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        for block, row in pairs:
            payload = [cache[:, block].contiguous().view(torch.uint8).flatten() for cache in self.caches]
            host[row] = torch.cat(payload).to(host.device)

    def swap_in(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        sizes = [cache[:, 0].numel() * self.dtype.itemsize for cache in self.caches]
        for row, block in pairs:
            for cache, payload in zip(self.caches, torch.split(host[row], sizes), strict=True):
                cache[:, block] = payload.to(self.device).view(self.dtype).view_as(cache[:, block])
