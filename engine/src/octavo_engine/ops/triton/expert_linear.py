"""Products of rows with the weights of their experts, in one launch for all experts.

The rows are sorted by expert. A program computes some columns for a tile of rows; it finds the tile's expert from the
list of each expert's first tile. Each expert gets one tile more than its rows fill, like each sequence in attention, so
the size of the grid does not depend on the rows of each expert, and the host need not know their numbers.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.ops.group_tensor import GroupTensor
from octavo_engine.ops.triton.group_values import NUM_STAGES, layout_of, multiply_groups, pointers_of
from octavo_engine.ops.triton.sizes import cdiv, next_power_of_2

_DEPTH_BYTES = 128  # bytes of each row that a loop step loads, by copies of 16 bytes
_FP32_WARPS = 8  # for tiles of 64 rows: 4 spill on sm_90; tiles of 16 are too small for 16-byte copies
_SUM_COLUMNS = 1024
_NO_START = tl.constexpr(1 << 30)


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a product that one program computes. `num_warps`: for 16-bit dtypes."""

    rows: int
    columns: int
    num_warps: int


TILES = (Tile(16, 64, 4), Tile(64, 128, 4), Tile(128, 128, 8))


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The pairs of a row and one of its experts ("choices"), sorted by expert. `slots`: index of each choice before
    sorting. `starts`: the first choice of each expert."""

    slots: Int[Tensor, " choices"]
    starts: Int[Tensor, " experts_plus_1"]
    top_k: int
    tile: Tile


def choose_tile(num_choices: int, num_experts: int) -> Tile:
    """Return the smallest tile that holds an expert's average number of rows; the host knows only the average."""
    return next((tile for tile in TILES if num_choices <= tile.rows * num_experts), TILES[-1])


def sort_rows(numbers: Int[Tensor, "rows k"], experts: Int[Tensor, " experts_plus_1"], tile: Tile) -> SortedRows:
    """Sort the choices by expert. `numbers`: the experts of each row. `experts`: the integers from 0 to the number of
    experts."""
    chosen, slots = numbers.flatten().sort(stable=True)
    return SortedRows(slots, torch.searchsorted(chosen, experts, out_int32=True), numbers.shape[1], tile)


def expert_linear(
    x: Float[Tensor, "rows n"],
    weight: Float[Tensor, "experts out n"] | GroupTensor,
    rows: SortedRows,
    *,
    is_sorted: bool,
) -> Float[Tensor, "choices out"]:
    """Multiply each choice's row by its expert's weight. `is_sorted`: `x` is sorted by expert and the outputs are in
    the order of the rows; otherwise `x` is in the order of the rows and the outputs are sorted."""
    num_experts, out_features, in_features = weight.shape
    num_choices, tile = len(rows.slots), rows.tile
    assert x.is_contiguous()
    out = torch.empty((num_choices, out_features), dtype=x.dtype, device=x.device)
    grid = ((num_choices // tile.rows + num_experts) * cdiv(out_features, tile.columns),)
    shape = {
        "EXPERTS": num_experts,
        "IDS": max(2, next_power_of_2(num_experts)),
        "TOP_K": rows.top_k,
        "OUT": out_features,
        "IN": in_features,
        "IS_SORTED": is_sorted,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
    }
    if isinstance(weight, GroupTensor):
        grouped_values_kernel[grid](
            *(out, x, *pointers_of(weight), weight.scales if weight.order is None else weight.order),
            *(rows.slots, rows.starts),
            **shape,
            **layout_of(weight, tile.rows),
            HAS_ORDER=weight.order is not None,
            num_warps=4 if tile.rows == 16 else 8,
            num_stages=NUM_STAGES[tile.rows],
        )
        return out
    assert weight.is_contiguous()
    expert_linear_kernel[grid](
        *(out, x, weight, rows.slots, rows.starts),
        **shape,
        DEPTH=_DEPTH_BYTES // x.dtype.itemsize,
        num_warps=_FP32_WARPS if x.dtype.itemsize == 4 and tile.rows >= 64 else tile.num_warps,
        num_stages=3,
    )
    return out


def add_experts(
    y: Float[Tensor, "choices n"],
    numbers: Int[Tensor, "rows k"],
    weights: Float[Tensor, "rows k"],
    start: Float[Tensor, "rows n"] | None,
) -> Float[Tensor, "rows n"]:
    """Return, for each row, the weighted sum of its experts' outputs, added to `start` in the order of the experts."""
    (num_rows, top_k), size = numbers.shape, y.shape[1]
    out = torch.empty((num_rows, size), dtype=y.dtype, device=y.device)
    add_experts_kernel[(num_rows, cdiv(size, _SUM_COLUMNS))](
        *(out, y, numbers.contiguous(), weights.contiguous(), out if start is None else start),
        SIZE=size,
        TOP_K=top_k,
        CHOICES=max(2, next_power_of_2(top_k)),
        COLUMNS=_SUM_COLUMNS,
        HAS_START=start is not None,
    )
    return out


@triton.jit
@no_type_check
def find_rows(starts_ptr, tile, EXPERTS: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile, the tile's first choice, and the end of the expert's choices."""
    ids = tl.arange(0, IDS)
    first_tiles = tl.load(starts_ptr + ids, mask=ids < EXPERTS, other=_NO_START) // ROWS + ids
    expert = tl.sum((first_tiles <= tile).to(tl.int32), 0) - 1
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    return expert, start + (tile - start // ROWS - expert) * ROWS, end


@triton.jit
@no_type_check
def expert_linear_kernel(
    out_ptr,  # [choices, OUT], contiguous
    x_ptr,  # [choices, IN], or [choices / TOP_K, IN] if not IS_SORTED; contiguous
    weight_ptr,  # [EXPERTS, OUT, IN], contiguous
    slots_ptr,  # [choices] int64: the place of each choice among those of all rows
    starts_ptr,  # [EXPERTS + 1] int32: the first choice of each expert
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,  # EXPERTS, or the next power of two
    TOP_K: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    IS_SORTED: tl.constexpr,  # inputs are sorted, outputs are in row order; else the reverse
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    num_columns = tl.cdiv(OUT, COLUMNS)
    expert, first, end = find_rows(starts_ptr, tl.program_id(0) // num_columns, EXPERTS, IDS, ROWS)
    if first >= end:
        return
    choice = first + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + choice, mask=choice < end, other=0)
    source = choice if IS_SORTED else slot // TOP_K
    target = slot if IS_SORTED else choice
    column = tl.program_id(0) % num_columns * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * IN + depth[None, :]
    weights = weight_ptr + tl.cast(expert, tl.int64) * (OUT * IN)
    weight_ptrs = weights + column.to(tl.int64)[None, :] * IN + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, IN, DEPTH):
        x = tl.load(x_ptrs + at, mask=(choice < end)[:, None] & (depth + at < IN)[None, :], other=0.0)
        weight = tl.load(weight_ptrs + at, mask=(column < OUT)[None, :] & (depth + at < IN)[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    out_ptrs = out_ptr + target.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(choice < end)[:, None] & (column < OUT)[None, :])


@triton.jit
@no_type_check
def grouped_values_kernel(
    out_ptr,  # as in `expert_linear_kernel`
    x_ptr,
    codes_ptr,  # [EXPERTS, OUT, bytes] uint8, contiguous
    scales_ptr,  # [EXPERTS, groups, OUT], contiguous
    offsets_ptr,  # the same; unused without OFFSETS
    table_ptr,  # [EXPERTS, 16] fp32; unused without a table
    order_ptr,  # [EXPERTS, IN] int32; unused without HAS_ORDER
    slots_ptr,
    starts_ptr,
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    IS_SORTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODES: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    num_columns = tl.cdiv(OUT, COLUMNS)
    expert, first, end = find_rows(starts_ptr, tl.program_id(0) // num_columns, EXPERTS, IDS, ROWS)
    if first >= end:
        return
    choice = first + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + choice, mask=choice < end, other=0)
    source = choice if IS_SORTED else slot // TOP_K
    target = slot if IS_SORTED else choice
    column = tl.program_id(0) % num_columns * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.cast(expert, tl.int64)
    row_bytes: tl.constexpr = IN // 2 if (CODES == "int4") or (CODES == "table4") else IN
    scales: tl.constexpr = IN // GROUP * OUT
    acc = multiply_groups(
        x_ptr + source.to(tl.int64) * IN,
        choice < end,
        codes_ptr + expert * (OUT * row_bytes),
        scales_ptr + expert * scales,
        offsets_ptr + expert * scales,
        table_ptr + expert * 16,
        order_ptr + expert * IN,
        column,
        OUT,
        row_bytes,
        0,
        IN // DEPTH,
        CODES,
        OFFSETS,
        GROUP,
        HAS_ORDER,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    out_ptrs = out_ptr + target.to(tl.int64)[None, :] * OUT + column[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(column < OUT)[:, None] & (choice < end)[None, :])


@triton.jit
@no_type_check
def add_experts_kernel(
    out_ptr,  # [rows, SIZE], contiguous
    y_ptr,  # [rows * TOP_K, SIZE], contiguous
    numbers_ptr,  # [rows, TOP_K] int64: of each row's experts
    weights_ptr,  # [rows, TOP_K] fp32
    start_ptr,  # [rows, SIZE] fp32, contiguous; unused without HAS_START
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_START: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    choice = tl.arange(0, CHOICES)
    number = tl.load(numbers_ptr + row * TOP_K + choice, mask=choice < TOP_K, other=1 << 40)
    order = number * CHOICES + choice  # without ties
    place = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
    acc = tl.zeros([COLUMNS], tl.float32)
    if HAS_START:
        acc = tl.load(start_ptr + row * SIZE + column, mask=mask, other=0.0)
    for i in range(TOP_K):
        slot = row * TOP_K + tl.sum(tl.where(place == i, choice, 0), 0)
        y = tl.load(y_ptr + slot * SIZE + column, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(weights_ptr + slot) * y
    tl.store(out_ptr + row * SIZE + column, acc.to(out_ptr.dtype.element_ty), mask=mask)
