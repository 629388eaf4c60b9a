"""Groups the sequences of a step by similar lengths for attention, with index and mask tensors.

Groups are made with numpy once per step and window size, and every layer uses them. A group's rows are padded to its
longest member: padded queries repeat the last real query, and their outputs are dropped; padded keys are masked.
Bucket edges grow geometrically, so padding stays below a quarter while the number of groups grows with the logarithm
of the length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch

Ints = npt.NDArray[np.int64]

_BUCKET_RATIO = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Sequences that attend in one call.

    `queries` [seqs, query_len]: token rows. `blocks` [seqs * n]: cache blocks, or None if K and V of this step are the
    whole context (the keys are then the tokens of `queries`). `mask` [seqs, query_len, keys]: True where visible; None
    means plain causal from position 0 (query_len > 1) or everything visible. `token_rows`: the output rows of the real
    queries; `group_rows`: their rows in the flattened group, None if there is no padding.
    """

    queries: Tensor
    blocks: Tensor | None
    mask: Tensor | None
    token_rows: Tensor
    group_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Per sequence, int64: first token row, tokens computed in this step, tokens with KV afterwards."""

    row: Ints
    query: Ints
    seq: Ints

    @staticmethod
    def from_batch(batch: AttentionBatch) -> "Lengths":
        starts = batch.query_start.numpy().astype(np.int64)
        return Lengths(starts[:-1], starts[1:] - starts[:-1], batch.seq_lens.numpy().astype(np.int64))


def make_groups(
    batch: AttentionBatch, lengths: Lengths, *, block_size: int, window: int | None, max_keys: int
) -> list[AttentionGroup]:
    """Make the groups of a step. `max_keys`: key positions that one group may gather, which bounds scratch memory."""
    first = lengths.seq - lengths.query
    oldest = np.zeros_like(first) if window is None else np.maximum(0, first + 1 - window)
    base = oldest // block_size
    num_blocks = -(-lengths.seq // block_size) - base
    fresh = (first == 0) & (lengths.query > 1)
    tables = batch.block_tables.numpy()
    groups = []
    for members in _buckets(lengths.query, num_blocks, fresh, max_keys // block_size):
        part = Lengths(lengths.row[members], lengths.query[members], lengths.seq[members])
        if fresh[members[0]]:
            groups.append(_fresh_group(part, window))
        else:
            blocks = _gathered_blocks(tables, members, base[members], num_blocks[members])
            groups.append(_paged_group(part, blocks, base[members] * block_size, block_size, window))
    return groups


def _buckets(query: Ints, num_blocks: Ints, fresh: npt.NDArray[np.bool_], max_blocks: int) -> Iterator[Ints]:
    """Yield the sequence indices of each group; sequences without queries are in no group."""
    edges = np.log(np.maximum(np.stack([query, num_blocks]), 1)) / np.log(_BUCKET_RATIO)
    code = np.ceil(edges).astype(np.int64)
    key = (code[0] * 1000 + code[1]) * 2 + fresh
    key[query == 0] = -1
    order = np.argsort(key, kind="stable")
    edges_at = np.flatnonzero(np.diff(key[order])) + 1
    for members in np.split(order, edges_at):
        if len(members) and key[members[0]] >= 0:
            cost = int(np.maximum(num_blocks, query // 16)[members].max())
            per_group = max(1, max_blocks // cost)
            yield from (members[i : i + per_group] for i in range(0, len(members), per_group))


def _gathered_blocks(tables: npt.NDArray[Any], members: Ints, base: Ints, num_blocks: Ints) -> Ints:
    """Return block tables padded with each sequence's last block, which holds finite numbers."""
    column = np.minimum(np.arange(num_blocks.max())[None, :], num_blocks[:, None] - 1) + base[:, None]
    blocks: Ints = tables[members[:, None], column].astype(np.int64)
    return blocks


def _query_rows(part: Lengths) -> tuple[Ints, npt.NDArray[np.bool_]]:
    offset = np.arange(part.query.max())[None, :]
    return part.row[:, None] + np.minimum(offset, part.query[:, None] - 1), offset < part.query[:, None]


def _fresh_group(part: Lengths, window: int | None) -> AttentionGroup:
    queries, real = _query_rows(part)
    mask = None
    if window is not None and queries.shape[1] > window:
        position = np.arange(queries.shape[1])
        mask = _visible(position[None, :, None], position[None, None, :], window)
        mask = np.repeat(mask, len(queries), axis=0)
    return _group(queries, real, None, mask)


def _paged_group(part: Lengths, blocks: Ints, base: Ints, block_size: int, window: int | None) -> AttentionGroup:
    queries, real = _query_rows(part)
    position = np.minimum(np.arange(queries.shape[1])[None, :], part.query[:, None] - 1)
    position = position + (part.seq - part.query)[:, None]
    key = base[:, None] + np.arange(blocks.shape[1] * block_size)[None, :]
    mask = _visible(position[:, :, None], key[:, None, :], window)
    return _group(queries, real, blocks, None if mask.all() else mask)


def _visible(query: Ints, key: Ints, window: int | None) -> npt.NDArray[np.bool_]:
    visible: npt.NDArray[np.bool_] = key <= query
    return visible if window is None else visible & (key > query - window)


def _group(
    queries: Ints, real: npt.NDArray[np.bool_], blocks: Ints | None, mask: npt.NDArray[np.bool_] | None
) -> AttentionGroup:
    padded = not real.all()
    return AttentionGroup(
        queries=torch.from_numpy(queries),
        blocks=None if blocks is None else torch.from_numpy(blocks.reshape(-1)),
        mask=None if mask is None else torch.from_numpy(mask),
        token_rows=torch.from_numpy(queries[real] if padded else queries.reshape(-1)),
        group_rows=torch.from_numpy(np.flatnonzero(real)) if padded else None,
    )
