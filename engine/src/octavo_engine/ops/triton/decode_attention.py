"""Attention of sequences with one query in a step, split over parts of their keys (Flash-Decoding, Dao et al. 2023).

A part is `PART_KEYS` keys of one sequence. A fixed number of programs takes the parts of all sequences and KV heads in
turn, so that few long sequences fill a GPU as well as many short ones, and the grid depends on no length. The parts of
a sequence are merged in their order: the bits of its output depend neither on other sequences nor on the number of
programs.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.triton.key_tiles import MIN_DOT, attend_keys, find_sequence, tile_keys

PART_KEYS = 512


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The parts of a step. Sequence i has parts `starts[i]` to `starts[i + 1]`, none if it has several queries.

    `most`: no smaller than the number of parts, and known to the host.
    """

    starts: Int[Tensor, " seqs_plus_1"]
    most: int


def decode_parts(batch: AttentionBatch) -> DecodeParts:
    """List the parts of a step without waiting for the device."""
    is_decode = batch.query_start.diff() == 1
    counts = (batch.seq_lens + (PART_KEYS - 1)) // PART_KEYS * is_decode
    starts = torch.zeros_like(batch.query_start)
    torch.cumsum(counts, 0, dtype=starts.dtype, out=starts[1:])
    return DecodeParts(starts, len(counts) + batch.num_keys // PART_KEYS)


def decode_attention(
    out: Float[Tensor, "tokens q_heads head_dim"],
    spec: AttentionSpec,
    q: Float[Tensor, "tokens q_heads head_dim"],
    cache: Float[Tensor, "blocks two kv_heads block_size head_dim"],
    batch: AttentionBatch,
    parts: DecodeParts,
    num_programs: int,
) -> None:
    """Write the outputs of sequences with one query to `out`. Rows of `q` may be strided."""
    _, heads, dim = q.shape
    kv_heads, block_size = cache.shape[2:4]
    num_seqs, table_width = batch.block_tables.shape
    assert q.stride(1) == dim
    assert q.stride(2) == 1
    dim_row = max(MIN_DOT, triton.next_power_of_2(dim))
    sums = torch.empty((parts.most, heads, dim), dtype=torch.float32, device=q.device)
    maxima, totals = (torch.empty((parts.most, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    decode_parts_kernel[(num_programs,)](
        *(sums, maxima, totals, q, cache, batch.block_tables, batch.seq_lens, batch.query_start, parts.starts),
        *(num_seqs, table_width, q.stride(0), spec.scale),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_ROWS=max(MIN_DOT, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        DIM_ROW=dim_row,
        BLOCK=block_size,
        PART=PART_KEYS,
        KEYS=tile_keys(dim, q.dtype),
        WINDOW=spec.kv.window or 0,
        SOFTCAP=spec.softcap or 0.0,
        num_warps=8 if dim_row > 128 else 4,  # with 4, heads of 256 spill on sm_80
        num_stages=3,
    )
    merge_parts_kernel[(num_seqs, heads)](
        *(out, sums, maxima, totals, batch.query_start, parts.starts),
        HEADS=heads,
        DIM=dim,
        DIM_ROW=dim_row,
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=["num_seqs", "table_width"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "query_starts_ptr", "starts_ptr"],
)
@no_type_check
def decode_parts_kernel(
    sums_ptr,  # [parts, KV_HEADS * GROUP, DIM] fp32: weighted values
    maxima_ptr,  # [parts, KV_HEADS * GROUP] fp32: the largest score, to the base 2
    totals_ptr,  # [parts, KV_HEADS * GROUP] fp32: the sum of weights
    q_ptr,  # [tokens, KV_HEADS * GROUP, DIM]; rows of stride q_stride
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM], contiguous
    tables_ptr,  # [num_seqs, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_starts_ptr,  # [num_seqs + 1] int32
    starts_ptr,  # [num_seqs + 1] int32: the first part of each sequence
    num_seqs,
    table_width,
    q_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
):
    rows, dims = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM_ROW)
    row_mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    num_items = tl.load(starts_ptr + num_seqs) * KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part, kv_head = item // KV_HEADS, item % KV_HEADS
        seq = find_sequence(starts_ptr, num_seqs, part, 0)
        length = tl.load(seq_lens_ptr + seq)
        first = (part - tl.load(starts_ptr + seq)) * PART
        end = tl.minimum(first + PART, length)
        if WINDOW > 0:
            first = tl.maximum(first, tl.maximum(0, length - WINDOW) // KEYS * KEYS)
        head = kv_head * GROUP + rows
        token = tl.load(query_starts_ptr + seq).to(tl.int64)
        place = (head * DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptr + token * q_stride + place, mask=row_mask, other=0.0)
        position = tl.zeros([GROUP_ROWS], tl.int32) + (length - 1)
        table_ptr = tables_ptr + tl.cast(seq, tl.int64) * table_width
        best, total, acc = attend_keys(
            *(q, position, cache_ptr, table_ptr, kv_head, first, end, scale),
            *(GROUP_ROWS, KV_HEADS, DIM, DIM_ROW, BLOCK, KEYS, WINDOW, SOFTCAP),
        )
        at_head = tl.cast(part, tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(sums_ptr + (at_head * DIM)[:, None] + dims[None, :], acc, mask=row_mask)
        tl.store(maxima_ptr + at_head, best, mask=rows < GROUP)
        tl.store(totals_ptr + at_head, total, mask=rows < GROUP)


@triton.jit(do_not_specialize_on_alignment=["query_starts_ptr", "starts_ptr"])
@no_type_check
def merge_parts_kernel(
    out_ptr,  # [tokens, HEADS, DIM], contiguous
    sums_ptr,
    maxima_ptr,
    totals_ptr,
    query_starts_ptr,
    starts_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROW: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts_ptr + seq).to(tl.int64)
    if tl.load(query_starts_ptr + seq + 1) - token != 1:
        return
    dims = tl.arange(0, DIM_ROW)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_ROW], tl.float32)
    for part in range(tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)):
        at = tl.cast(part, tl.int64) * HEADS + head
        part_best = tl.load(maxima_ptr + at)
        new_best = tl.maximum(best, part_best)
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)  # a part that the window hides
        kept, added = tl.exp2(best - safe_best), tl.exp2(part_best - safe_best)
        total = total * kept + added * tl.load(totals_ptr + at)
        acc = acc * kept + added * tl.load(sums_ptr + at * DIM + dims, mask=dims < DIM, other=0.0)
        best = new_best
    out = (acc / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * HEADS + head) * DIM + dims, out, mask=dims < DIM)
