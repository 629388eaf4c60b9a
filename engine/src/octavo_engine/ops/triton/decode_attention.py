"""Attention of sequences with one query in a step, split over parts of their keys (Flash-Decoding, Dao et al. 2023).

A part is 128 keys of one sequence, or 512 if its query sees more than 2048 keys; parts outside a sliding window are not
listed. A fixed number of programs takes the parts of all sequences and KV heads in turn, so that a few long sequences
occupy a GPU as well as many short ones. The parts of a sequence are merged in a fixed order: the bits of its output
depend neither on other sequences nor on the number of programs.

A launch depends on shapes, on `AttentionBatch.num_keys` and on the number of programs; everything else is read on the
device. A captured step, whose graph includes `list_parts`, may therefore be replayed with other query starts, lengths
and block tables, if it has as many sequences (some may have no query) and in all at most `num_keys` keys.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.triton.key_tiles import MIN_DOT, attend_keys, find_sequence, heads_of_program, tile_keys
from octavo_engine.ops.triton.sizes import next_power_of_2

SHORT_PART = tl.constexpr(128)  # keys
LONG_PART = tl.constexpr(512)
MOST_IN_SHORT_PARTS = tl.constexpr(2048)  # keys that a query sees


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The parts of a step for one window size. Sequence i has the parts `starts[i]` to `starts[i + 1]` (exclusive); it
    has no part if it has several queries.

    `most`: no smaller than the number of parts, and known to the host.
    """

    starts: Int[Tensor, " seqs_plus_1"]
    most: int


def most_parts(num_seqs: int, num_keys: int) -> int:
    """Return a bound for the parts of sequences that have `num_keys` keys in all.

    Each sequence has at most two parts that are not full: its first and its last. There are at most `num_keys // short`
    full parts, and at most `num_keys // long` plus a few per sequence.
    """
    short, long, most = SHORT_PART.value, LONG_PART.value, MOST_IN_SHORT_PARTS.value
    parts: int = min(num_keys // short, num_keys // long + (most // short - most // long) * num_seqs)
    return 2 * num_seqs + parts


def list_parts(batch: AttentionBatch, window: int | None) -> DecodeParts:
    """List the parts of a step without waiting for the device."""
    starts, num_seqs = torch.empty_like(batch.query_start), len(batch.seq_lens)
    list_parts_kernel[(1,)](
        *(starts, batch.seq_lens, batch.query_start, num_seqs), WINDOW=window or 0, SEQS=1024, num_warps=4
    )
    return DecodeParts(starts, most_parts(num_seqs, batch.num_keys))


@dataclass(frozen=True, slots=True)
class Processor:
    """A multiprocessor's room for programs. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

    shared_bytes: int
    threads: int
    registers: int = 1 << 16  # of every GPU since sm_80

    def num_programs(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """Return how many programs run at a time. `registers`: per thread; `shared_bytes`, `num_warps`: per program.

        A GPU allocates a warp's registers in units of 256, and CUDA takes 1 KiB of each program's shared memory.
        """
        warp_registers = -(-registers * 32 // 256) * 256
        by_registers, by_threads = self.registers // (warp_registers * num_warps), self.threads // (32 * num_warps)
        return max(1, min(by_registers, by_threads, self.shared_bytes // (shared_bytes + 1024)))


def decode_attention(
    out: Float[Tensor, "tokens q_heads head_dim"],
    spec: AttentionSpec,
    q: Float[Tensor, "tokens q_heads head_dim"],
    cache: Shaped[Tensor, "blocks two kv_heads block_size head_dim"],
    batch: AttentionBatch,
    parts: DecodeParts,
    num_programs: int,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    has_e4m3: bool = False,
) -> Any:
    """Write to `out` for sequences with one query; return the compiled kernel, or None in Triton's interpreter.

    Rows of `q` may be strided. `scales`, `has_e4m3`: see `paged_attention`.
    """
    _, heads, dim = q.shape
    kv_heads, block_size = cache.shape[2:4]
    num_seqs, table_width = batch.block_tables.shape
    assert q.stride(1) == dim
    assert q.stride(2) == 1
    dim_row = max(MIN_DOT, next_power_of_2(dim))
    sums = torch.empty((parts.most, heads, dim), dtype=torch.float32, device=q.device)
    maxima, totals = (torch.empty((parts.most, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    group = heads_of_program(heads // kv_heads, dim)
    kernel = decode_parts_kernel[(num_programs,)](
        *(out, sums, maxima, totals, q, cache, batch.block_tables, batch.seq_lens, batch.query_start, parts.starts),
        *(num_seqs, table_width, q.stride(0), spec.scale * scales[0], scales[1]),
        KV_HEADS=kv_heads,
        GROUPS=heads // group,
        GROUP=group,
        GROUP_ROWS=max(MIN_DOT, next_power_of_2(group)),
        DIM=dim,
        DIM_ROW=dim_row,
        BLOCK=block_size,
        KEYS=tile_keys(dim, q.dtype),
        WINDOW=spec.kv.window or 0,
        SOFTCAP=spec.softcap or 0.0,
        HAS_E4M3=has_e4m3,
        num_warps=8 if dim_row > 128 or q.dtype.itemsize > 2 else 4,  # with 4, heads of 256 and fp32 spill
        num_stages=3,
        maxnreg=255 if cache.dtype == torch.uint8 and dim < 128 else None,  # without it, some sizes spill a few bytes
    )
    merge_parts_kernel[(num_seqs, heads)](
        *(out, sums, maxima, totals, batch.query_start, parts.starts),
        HEADS=heads,
        DIM=dim,
        DIM_ROW=dim_row,
        num_warps=1,
    )
    return kernel


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["starts_ptr", "seq_lens_ptr", "query_starts_ptr"],
)
@no_type_check
def list_parts_kernel(
    starts_ptr,  # [num_seqs + 1] int32: written
    seq_lens_ptr,  # [num_seqs] int32
    query_starts_ptr,  # [num_seqs + 1] int32
    num_seqs,
    WINDOW: tl.constexpr,  # 0: none
    SEQS: tl.constexpr,  # sequences computed at a time
):
    total = 0
    tl.store(starts_ptr, total)
    for at in range(0, num_seqs, SEQS):
        seq = at + tl.arange(0, SEQS)
        is_real = seq < num_seqs
        length = tl.load(seq_lens_ptr + seq, mask=is_real, other=0)
        start = tl.load(query_starts_ptr + seq, mask=is_real, other=0)
        is_decode = tl.load(query_starts_ptr + seq + 1, mask=is_real, other=0) - start == 1
        _, _, first_part, end_part = visible_parts(length, WINDOW)
        count = tl.where(is_decode, end_part - first_part, 0)
        tl.store(starts_ptr + seq + 1, total + tl.cumsum(count, 0), mask=is_real)
        total += tl.sum(count, 0)


@triton.jit
@no_type_check
def visible_parts(length, WINDOW: tl.constexpr):
    """Return the size of a sequence's parts, its first visible key, its first part, and one after its last part."""
    seen = tl.minimum(length, WINDOW) if WINDOW > 0 else length
    size = tl.where(seen > MOST_IN_SHORT_PARTS, LONG_PART, SHORT_PART)
    first_key = length - seen
    return size, first_key, first_key // size, (length + size - 1) // size


@triton.jit(
    do_not_specialize=["num_seqs", "table_width"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "query_starts_ptr", "starts_ptr"],
)
@no_type_check
def decode_parts_kernel(
    out_ptr,  # [tokens, GROUPS * GROUP, DIM], contiguous: written for sequences with one part
    sums_ptr,  # [parts, GROUPS * GROUP, DIM] fp32: weighted values
    maxima_ptr,  # [parts, GROUPS * GROUP] fp32: the largest score, to the base 2
    totals_ptr,  # [parts, GROUPS * GROUP] fp32: the sum of weights
    q_ptr,  # [tokens, GROUPS * GROUP, DIM]; rows of stride q_stride
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM], contiguous
    tables_ptr,  # [num_seqs, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_starts_ptr,  # [num_seqs + 1] int32
    starts_ptr,  # [num_seqs + 1] int32: the first part of each sequence
    num_seqs,
    table_width,
    q_stride,
    scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,  # of query heads; one or several share a KV head
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_E4M3: tl.constexpr,
):
    rows, dims = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM_ROW)
    row_mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    num_items = tl.load(starts_ptr + num_seqs) * GROUPS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part, group = item // GROUPS, item % GROUPS
        seq = find_sequence(starts_ptr, num_seqs, part, 0)
        length = tl.load(seq_lens_ptr + seq)
        size, first_key, first_part, end_part = visible_parts(length, WINDOW)
        first = (first_part + part - tl.load(starts_ptr + seq)) * size
        end = first + tl.minimum(size, length - first)  # this form of the minimum needs fewer registers
        if WINDOW > 0:
            first = tl.maximum(first, first_key // KEYS * KEYS)
        head = group * GROUP + rows
        token = tl.load(query_starts_ptr + seq).to(tl.int64)
        place = (head * DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptr + token * q_stride + place, mask=row_mask, other=0.0)
        position = tl.zeros([GROUP_ROWS], tl.int32) + (length - 1)
        table_ptr = tables_ptr + tl.cast(seq, tl.int64) * table_width
        best, total, acc = attend_keys(
            *(q, position, cache_ptr, table_ptr, group * KV_HEADS // GROUPS, first, end, scale, v_scale),
            *(GROUP_ROWS, KV_HEADS, DIM, DIM_ROW, BLOCK, KEYS, WINDOW, SOFTCAP, HAS_E4M3),
        )
        if end_part - first_part == 1:
            out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * (GROUPS * GROUP * DIM) + place, out, mask=row_mask)
        else:
            at_part = tl.cast(part, tl.int64) * (GROUPS * GROUP)
            tl.store(sums_ptr + at_part * DIM + place, acc, mask=row_mask)
            tl.store(maxima_ptr + at_part + head, best, mask=rows < GROUP)
            tl.store(totals_ptr + at_part + head, total, mask=rows < GROUP)


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
    first, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if (tl.load(query_starts_ptr + seq + 1) - token != 1) | (end - first == 1):
        return
    dims = tl.arange(0, DIM_ROW)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_ROW], tl.float32)
    for part in range(first, end):
        at = tl.cast(part, tl.int64) * HEADS + head
        part_best = tl.load(maxima_ptr + at)
        new_best = tl.maximum(best, part_best)
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)  # -inf - -inf is NaN
        kept, added = tl.exp2(best - safe_best), tl.exp2(part_best - safe_best)
        total = total * kept + added * tl.load(totals_ptr + at)
        acc = acc * kept + added * tl.load(sums_ptr + at * DIM + dims, mask=dims < DIM, other=0.0)
        best = new_best
    out = (acc / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * HEADS + head) * DIM + dims, out, mask=dims < DIM)
