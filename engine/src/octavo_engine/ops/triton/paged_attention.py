"""Causal attention over a paged KV cache in Triton, for sequences with several queries in a step.

A program computes one tile: some consecutive queries of one sequence, for all query heads that share a KV head, packed
as the rows of one matrix. The grid follows from shapes alone, so that the host never waits for the device: every
sequence gets one tile more than its queries fill, and a program finds its sequence by binary search. The softmax is
computed online (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023) over tiles of keys; keys that no query of
the tile sees, because of causality or the window, are not loaded.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch, AttentionSpec

_LOG2_E = tl.constexpr(1.4426950408889634)
MIN_DOT = 16  # the least size of each dimension of a product
#: Bytes of a tile of K. The pipeline's tiles of K and V fit into the 99 KiB of shared memory of sm_86 and sm_89.
_KEY_TILE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of a tile. `group_rows`: rows for each query, a power of two of at least the heads that share a KV head."""

    queries: int
    group_rows: int
    keys: int
    num_warps: int


def tile_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many keys a tile of K has."""
    row_bytes: int = triton.next_power_of_2(head_dim) * dtype.itemsize
    return max(MIN_DOT, min(64, _KEY_TILE_BYTES // row_bytes))


def tile_shape(spec: AttentionSpec, dtype: torch.dtype) -> TileShape:
    """Choose sizes for which no GPU since sm_80 spills registers; they were never tuned on a GPU."""
    group_rows: int = triton.next_power_of_2(spec.num_heads // spec.kv.num_kv_heads)
    row_bytes: int = triton.next_power_of_2(spec.kv.head_dim) * dtype.itemsize
    keys = tile_keys(spec.kv.head_dim, dtype)
    is_wide = dtype.itemsize > 2  # products of fp32 run outside the tensor cores, and hold more registers
    # 8 query heads of 128 for each KV head spill on sm_80 with 64 rows.
    rows = 64 if row_bytes <= 256 and row_bytes * group_rows <= 1024 and not is_wide else 32
    return TileShape(max(1, rows // group_rows), group_rows, keys, num_warps=8 if rows == 64 or is_wide else 4)


def paged_attention(
    out: Float[Tensor, "tokens q_heads head_dim"],
    spec: AttentionSpec,
    q: Float[Tensor, "tokens q_heads head_dim"],
    cache: Float[Tensor, "blocks two kv_heads block_size head_dim"],
    batch: AttentionBatch,
) -> None:
    """Write the outputs of sequences with several queries to `out`. K is `cache[:, 0]`, V `cache[:, 1]`.

    Rows of `q` may be strided.
    """
    tokens, heads, dim = q.shape
    kv_heads, block_size = cache.shape[2:4]
    num_seqs, table_width = batch.block_tables.shape
    assert q.stride(1) == dim
    assert q.stride(2) == 1
    tile = tile_shape(spec, q.dtype)
    paged_attention_kernel[(tokens // tile.queries + num_seqs, kv_heads)](
        out,
        q,
        cache,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start,
        num_seqs,
        table_width,
        q.stride(0),
        spec.scale,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_ROWS=tile.group_rows,
        QUERIES=tile.queries,
        DIM=dim,
        DIM_ROW=max(MIN_DOT, triton.next_power_of_2(dim)),
        BLOCK=block_size,
        KEYS=tile.keys,
        WINDOW=spec.kv.window or 0,
        SOFTCAP=spec.softcap or 0.0,
        num_warps=tile.num_warps,
        num_stages=3,
    )


@triton.jit
@no_type_check
def find_sequence(starts_ptr, num_seqs, tile, QUERIES: tl.constexpr):
    """Find the sequence of a tile: the last one whose first tile, starts[i] // QUERIES + i, is at most `tile`."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
@no_type_check
def masked_scores(q, k, key, position, scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):
    """Compute scores to the base 2, -inf where a query does not see a key."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0.0:
        score = SOFTCAP * (2.0 * tl.sigmoid(score * (2.0 / SOFTCAP)) - 1.0)  # tanh
    visible = key[None, :] <= position[:, None]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(visible, score * _LOG2_E, float("-inf"))


@triton.jit
@no_type_check
def add_keys(best, total, acc, score, v):
    """Add a tile of keys to the running maximum, sum and weighted values of each row."""
    new_best = tl.maximum(best, tl.max(score, 1))
    safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that sees no key yet
    weight = tl.exp2(score - safe_best[:, None])
    kept = tl.exp2(best - safe_best)
    total = total * kept + tl.sum(weight, 1)
    acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new_best, total, acc


@triton.jit(
    do_not_specialize=["num_seqs", "table_width"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "starts_ptr"],
)
@no_type_check
def paged_attention_kernel(
    out_ptr,  # [tokens, KV_HEADS * GROUP, DIM], contiguous
    q_ptr,  # the same shape; rows of stride q_stride
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM], contiguous
    tables_ptr,  # [num_seqs, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32, with this step's tokens
    starts_ptr,  # [num_seqs + 1] int32: the first token of each sequence
    num_seqs,
    table_width,
    q_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = find_sequence(starts_ptr, num_seqs, tile, QUERIES)
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    first = (tile - start // QUERIES - seq) * QUERIES
    if (first >= num_queries) | (num_queries == 1):
        return
    computed = tl.load(seq_lens_ptr + seq) - num_queries  # tokens before this step

    rows, dims = tl.arange(0, QUERIES * GROUP_ROWS), tl.arange(0, DIM_ROW)
    query = first + rows // GROUP_ROWS
    is_real = (query < num_queries) & (rows % GROUP_ROWS < GROUP)
    q_mask = is_real[:, None] & (dims < DIM)[None, :]
    token = (start + query).to(tl.int64)
    place = ((kv_head * GROUP + rows % GROUP_ROWS) * DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptr + (token * q_stride)[:, None] + place, mask=q_mask, other=0.0)
    position = computed + query

    end = computed + tl.minimum(num_queries, first + QUERIES)
    begin = tl.maximum(0, computed + first + 1 - WINDOW) // KEYS * KEYS if WINDOW > 0 else 0
    best = tl.full([QUERIES * GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_ROWS], tl.float32)
    acc = tl.zeros([QUERIES * GROUP_ROWS, DIM_ROW], tl.float32)
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * table_width
    for at in tl.range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        block = tl.load(table_ptr + key // BLOCK, mask=key < end, other=0).to(tl.int64)
        offset = block * (2 * KV_HEADS * BLOCK * DIM) + (kv_head * BLOCK + key % BLOCK) * DIM
        kv_mask = (key < end)[:, None] & (dims < DIM)[None, :]
        k_ptrs = cache_ptr + offset[:, None] + dims[None, :]
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0)
        v = tl.load(k_ptrs + KV_HEADS * BLOCK * DIM, mask=kv_mask, other=0.0)
        score = masked_scores(q, k, key, position, scale, WINDOW, SOFTCAP)
        best, total, acc = add_keys(best, total, acc, score, v)
    out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * (KV_HEADS * GROUP * DIM))[:, None] + place, out, mask=q_mask)
