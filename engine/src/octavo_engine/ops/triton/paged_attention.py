"""Causal attention over a paged KV cache in Triton, for sequences with several queries in a step.

A program computes one tile: some consecutive queries of one sequence, for all query heads that share a KV head (or
for a part of these, if they are wide), packed as the rows of one matrix. The grid follows from shapes alone, so that
the host never waits for the device: every sequence gets one tile more than its queries fill, and a program finds its
sequence by binary search. Keys that no query of the tile sees, because of causality or the window, are not loaded.

A captured step may be replayed with other query starts, lengths and block tables of the same number of sequences, and
with fewer tokens: tokens after the last query start belong to no sequence, and their outputs are not written.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.triton.key_tiles import (
    MIN_DOT,
    MOST_VALUES,
    attend_keys,
    find_sequence,
    heads_of_program,
    tile_keys,
)
from octavo_engine.ops.triton.sizes import next_power_of_2


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of a tile. `group`: query heads of it, which share a KV head. `group_rows`: rows for each query, a power of
    two of at least `group`."""

    queries: int
    group: int
    group_rows: int
    keys: int
    num_warps: int


def tile_shape(spec: AttentionSpec, dtype: torch.dtype, *, has_wgmma: bool = False) -> TileShape:
    """Choose tile sizes that spill no registers on sm_80 and sm_90; their speed was never tuned on a GPU.

    `has_wgmma`: four warps multiply 64 rows from shared memory (227 KiB on sm_90). Tiles of 128 rows then use two
    groups of four warps, for every shape of heads, and read K and V half as often.
    """
    group = heads_of_program(spec.num_heads // spec.kv.num_kv_heads, spec.kv.head_dim)
    group_rows = next_power_of_2(group)
    dim_row = next_power_of_2(spec.kv.head_dim)
    row_bytes, keys = dim_row * dtype.itemsize, tile_keys(spec.kv.head_dim, dtype)
    is_wide = dtype.itemsize > 2  # products of fp32 run outside the tensor cores, and hold more registers
    if dim_row > 256:  # latents
        return TileShape(max(1, MOST_VALUES // dim_row // group_rows), group, group_rows, keys, num_warps=8)
    if has_wgmma and not is_wide and group_rows <= 128:
        return TileShape(128 // group_rows, group, group_rows, keys, num_warps=8)
    # 8 query heads of 128 for each KV head spill on sm_80 with 64 rows.
    rows = 64 if row_bytes <= 256 and row_bytes * group_rows <= 1024 and not is_wide else 32
    return TileShape(max(1, rows // group_rows), group, group_rows, keys, num_warps=8 if rows == 64 or is_wide else 4)


def paged_attention(
    out: Float[Tensor, "tokens q_heads head_dim"],
    spec: AttentionSpec,
    q: Float[Tensor, "tokens q_heads head_dim"],
    cache: Shaped[Tensor, "blocks two kv_heads block_size head_dim"],
    batch: AttentionBatch,
    *,
    has_wgmma: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    has_e4m3: bool = False,
) -> None:
    """Write the outputs of sequences with several queries to `out`. K is `cache[:, 0]`, V `cache[:, 1]`.

    `q` may be strided. `has_wgmma`, `has_e4m3`: features of the GPU. A cache of dtype uint8 holds e4m3 codes, which are
    multiplied by `scales`, one for K and one for V.
    """
    tokens, heads, dim = q.shape
    kv_heads, block_size = cache.shape[2:4]
    num_seqs, table_width = batch.block_tables.shape
    assert q.stride(1) == dim
    assert q.stride(2) == 1
    tile = tile_shape(spec, q.dtype, has_wgmma=has_wgmma)
    paged_attention_kernel[(tokens // tile.queries + num_seqs, heads // tile.group)](
        out,
        q,
        cache,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start,
        num_seqs,
        table_width,
        q.stride(0),
        spec.scale * scales[0],
        scales[1],
        KV_HEADS=kv_heads,
        GROUPS=heads // tile.group,
        GROUP=tile.group,
        GROUP_ROWS=tile.group_rows,
        QUERIES=tile.queries,
        DIM=dim,
        DIM_ROW=max(MIN_DOT, next_power_of_2(dim)),
        BLOCK=block_size,
        KEYS=tile.keys,
        WINDOW=spec.kv.window or 0,
        SOFTCAP=spec.softcap or 0.0,
        HAS_E4M3=has_e4m3,
        num_warps=tile.num_warps,
        num_stages=3,
    )


@triton.jit(
    do_not_specialize=["num_seqs", "table_width"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "starts_ptr"],
)
@no_type_check
def paged_attention_kernel(
    out_ptr,  # [tokens, GROUPS * GROUP, DIM], contiguous
    q_ptr,  # the same shape; rows of stride q_stride
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM], contiguous
    tables_ptr,  # [num_seqs, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32, with this step's tokens
    starts_ptr,  # [num_seqs + 1] int32: the first token of each sequence
    num_seqs,
    table_width,
    q_stride,
    scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,  # of query heads; one or several share a KV head
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_E4M3: tl.constexpr,
):
    tile, group = tl.program_id(0), tl.program_id(1)
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
    place = ((group * GROUP + rows % GROUP_ROWS) * DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptr + (token * q_stride)[:, None] + place, mask=q_mask, other=0.0)
    position = computed + query

    end = computed + tl.minimum(num_queries, first + QUERIES)
    begin = tl.maximum(0, computed + first + 1 - WINDOW) // KEYS * KEYS if WINDOW > 0 else 0
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * table_width
    _, total, acc = attend_keys(
        *(q, position, cache_ptr, table_ptr, group * KV_HEADS // GROUPS, begin, end, scale, v_scale),
        *(QUERIES * GROUP_ROWS, KV_HEADS, DIM, DIM_ROW, BLOCK, KEYS, WINDOW, SOFTCAP, HAS_E4M3),
    )
    out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * (GROUPS * GROUP * DIM))[:, None] + place, out, mask=q_mask)
