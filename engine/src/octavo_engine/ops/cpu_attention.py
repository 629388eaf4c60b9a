"""Paged attention on a CPU in torch: gathers blocks, then runs SDPA over groups of sequences of similar lengths.

No Python loop runs over sequences: `begin_step` groups sequences of similar lengths (`cpu_length_groups`), and each
layer makes one call per group. Query heads that share a KV head become rows of one matrix (decode) or a broadcast
dimension (prefill), so K and V are never expanded. Soft-capped layers compute their scores in fp32, explicitly.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.attention import AttendByParts, AttentionBatch, AttentionSpec, LayerKVSpec
from octavo_engine.ops.cpu_cache import PagedCache, Scratch
from octavo_engine.ops.cpu_length_groups import AttentionGroup, Lengths, make_groups

_GATHER_BYTES = 32 << 20  # keys that one group may gather, and the same amount of values
_SCORE_ELEMENTS = 8 << 20  # fp32 scores that a soft-capped layer holds at a time


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Tensors that all layers of a step share. `written`: token rows with a slot, None if all have one."""

    slots: Tensor
    written: Tensor | None
    started_blocks: Tensor
    groups: dict[int | None, list[AttentionGroup]]  # by window


class CpuBackend(AttendByParts):
    """`AttentionBackend` in torch. KV is stored in `dtype`."""

    def __init__(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self.cache = PagedCache(specs, block_size, dtype)
        self.copy_blocks = self.cache.copy_blocks
        self.swap_out = self.cache.swap_out
        self.swap_in = self.cache.swap_in
        self._windows = {spec.window for spec in specs}
        widest = max(spec.num_kv_heads * spec.head_dim for spec in specs)
        self._max_keys = max(block_size, _GATHER_BYTES // (widest * dtype.itemsize))
        self._scratch = Scratch(dtype)

    def allocate(self, num_blocks: int) -> None:
        self.cache.allocate(num_blocks)

    def release(self) -> None:
        self.cache.release()
        self._scratch.release()

    def bytes_per_block(self) -> int:
        return self.cache.bytes_per_block()

    def begin_step(self, batch: AttentionBatch) -> None:
        lengths = Lengths.from_batch(batch)
        slots = batch.slots.long()
        written = None if bool((slots >= 0).all()) else (slots >= 0).nonzero().flatten()
        slots = slots if written is None else slots[written]
        groups = {
            window: make_groups(batch, lengths, block_size=self.block_size, window=window, max_keys=self._max_keys)
            for window in self._windows
        }
        batch.private = StepTensors(slots, written, self._started_blocks(slots), groups)

    def attend(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "tokens q_heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        batch: AttentionBatch,
    ) -> Float[Tensor, "tokens q_heads head_dim"]:
        step: StepTensors = batch.private
        new_k, new_v = (k, v) if step.written is None else (k[step.written], v[step.written])
        self.cache.write(spec.layer_idx, new_k, new_v, step.slots, step.started_blocks)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for group in step.groups[spec.kv.window]:
            self._attend_group(spec, group, q, (k, v), out)
        return out

    def _started_blocks(self, slots: Tensor) -> Tensor:
        offset = slots % self.block_size
        started = slots[offset == 0] // self.block_size
        filled = slots[offset == self.block_size - 1] // self.block_size
        return started[~torch.isin(started, filled)]

    def _attend_group(
        self, spec: AttentionSpec, group: AttentionGroup, q: Tensor, fresh: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        num_seqs, query_len = group.queries.shape
        heads = (spec.kv.num_kv_heads, spec.num_heads // spec.kv.num_kv_heads, spec.kv.head_dim)
        rows = q.index_select(0, group.queries.view(-1)).view(num_seqs, query_len, *heads)
        if group.blocks is None:
            keys, values = (x[group.queries].transpose(1, 2) for x in fresh)
        else:
            keys, values = self.cache.gather(spec.layer_idx, group.blocks, num_seqs, self._scratch)
        if spec.softcap is not None:
            result = attend_softcap(spec, rows, keys, values, group.mask)
        elif query_len == 1:
            result = attend_decode(spec, rows, keys, values, group.mask)
        else:
            result = attend_prefill(spec, rows, keys, values, group.mask)
        result = result.reshape(-1, spec.num_heads, spec.kv.head_dim)
        real = result if group.group_rows is None else result[group.group_rows]
        out.index_copy_(0, group.token_rows, real)


def attend_decode(
    spec: AttentionSpec,
    q: Float[Tensor, "seqs 1 kv_heads group head_dim"],
    k: Float[Tensor, "seqs kv_heads keys head_dim"],
    v: Float[Tensor, "seqs kv_heads keys head_dim"],
    mask: Tensor | None,
) -> Tensor:
    """Attend with one query per sequence: the query heads of a KV head are the rows of its score matrix."""
    visible = None if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q[:, 0], k, v, attn_mask=visible, scale=spec.scale)


def attend_prefill(
    spec: AttentionSpec,
    q: Float[Tensor, "seqs query_len kv_heads group head_dim"],
    k: Float[Tensor, "seqs kv_heads keys head_dim"],
    v: Float[Tensor, "seqs kv_heads keys head_dim"],
    mask: Tensor | None,
) -> Float[Tensor, "seqs query_len kv_heads group head_dim"]:
    """Attend with (sequence, KV head) as SDPA's batch dimension; one K and V are broadcast over a group's heads."""
    num_seqs, query_len, kv_heads, group, head_dim = q.shape
    queries = q.permute(0, 2, 3, 1, 4).reshape(-1, group, query_len, head_dim)
    keys, values = (x.reshape(-1, 1, x.shape[2], head_dim).expand(-1, group, -1, -1) for x in (k, v))
    visible = None if mask is None else mask.repeat_interleave(kv_heads, 0)[:, None]
    result = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible, is_causal=mask is None, scale=spec.scale
    )
    return result.view(num_seqs, kv_heads, group, query_len, head_dim).permute(0, 3, 1, 2, 4)


def attend_softcap(
    spec: AttentionSpec,
    q: Float[Tensor, "seqs query_len kv_heads group head_dim"],
    k: Float[Tensor, "seqs kv_heads keys head_dim"],
    v: Float[Tensor, "seqs kv_heads keys head_dim"],
    mask: Tensor | None,
) -> Float[Tensor, "seqs query_len kv_heads group head_dim"]:
    """Attend with soft-capped fp32 scores, some query positions at a time; `mask`: see `AttentionGroup`."""
    assert spec.softcap is not None
    keys, values = k.float()[:, :, None], v.float()[:, :, None]
    queries = q.float().permute(0, 2, 3, 1, 4)  # [seqs, kv_heads, group, query_len, head_dim]
    query_len, num_keys = q.shape[1], k.shape[2]
    chunk = max(1, _SCORE_ELEMENTS // (queries[..., 0, 0].numel() * num_keys))
    parts = []
    for start in range(0, query_len, chunk):
        end = min(start + chunk, query_len)
        scores = queries[..., start:end, :] @ keys.transpose(-1, -2) * spec.scale
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if mask is not None:
            scores.masked_fill_(~mask[:, None, None, start:end], float("-inf"))
        elif query_len > 1:
            ahead = torch.ones(end - start, num_keys, dtype=torch.bool).triu_(start + 1)
            scores.masked_fill_(ahead, float("-inf"))
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts, dim=3).permute(0, 3, 1, 2, 4).to(q.dtype)
