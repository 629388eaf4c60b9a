"""Products of rows with a group-quantised weight: by a kernel for up to MAX_ROWS rows, otherwise by torch.

Both ways use the values of `expand_groups` and add in fp32. Each program of the kernel computes some outputs for a tile
of rows from one part of the inputs; a second launch adds the parts in order. The number of parts depends on the
weight's shape and the tile, and the number of rows selects the tile. A row's result thus depends on no other row, and
is equal for all numbers of rows with the same tile: 1 to 16, 17 to 64, 65 to MAX_ROWS.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.group_tensor import GroupTensor
from octavo_engine.ops.triton.expert_linear import Tile
from octavo_engine.ops.triton.group_values import (
    NUM_STAGES,
    depth_of,
    group_values,
    layout_of,
    multiply_groups,
    pointers_of,
    spread_groups,
)
from octavo_engine.ops.triton.sizes import cdiv

#: For more rows than this, expanding the weight is faster than the kernel.
MAX_ROWS = 256
TILES = (Tile(16, 64, 4), Tile(64, 128, 8), Tile(128, 128, 8))
_PROGRAMS = {16: 512, 64: 256, 128: 256}  # by a tile's rows: about as many programs as a large GPU runs at a time
_LEAST_STEPS = 4  # least loop steps of a part, so that products take most of its time
_SUM_COLUMNS = 1024
_EXPANDED_COLUMNS = 32


def group_linear(
    x: Float[Tensor, "rows n"],
    weight: GroupTensor,
    bias: Float[Tensor, " out"] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "rows out"]:
    """Multiply rows of 16 bits, whose inputs lie in the order of the weight's rows.

    `out_dtype`: fp32 keeps the unrounded sums of 16-bit inputs; only the kernel can do that.
    """
    out_dtype = out_dtype or x.dtype
    if len(x) > MAX_ROWS and out_dtype == x.dtype:
        return F.linear(x, expand(weight, x.dtype), bias)
    tile = choose_tile(len(x))
    return multiply(x, weight, bias, out_dtype, tile, num_parts(weight, tile))


def choose_tile(num_rows: int) -> Tile:
    return next((tile for tile in TILES if num_rows <= tile.rows), TILES[-1])


def num_parts(weight: GroupTensor, tile: Tile) -> int:
    """Return into how many parts the inputs are divided, so that a weight with few outputs also occupies a GPU."""
    out, size = weight.shape
    steps, columns = size // depth_of(weight.format, size, tile.rows), max(1, cdiv(out, tile.columns))
    return max(1, min(_PROGRAMS[tile.rows] // columns, steps // _LEAST_STEPS))


def compile_tiles(weight: GroupTensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Compile the kernels for each tile, so that no step has to wait for a compilation."""
    x = torch.zeros(1, weight.shape[1], dtype=dtype, device=weight.codes.device)
    for tile in TILES:
        multiply(x, weight, bias, out_dtype, tile, num_parts(weight, tile))
    if out_dtype == dtype:  # fp32 outputs never use it
        expand(weight, dtype)


def multiply(
    x: Float[Tensor, "rows n"],
    weight: GroupTensor,
    bias: Float[Tensor, " out"] | None,
    out_dtype: torch.dtype,
    tile: Tile,
    num_parts: int,
) -> Float[Tensor, "rows out"]:
    """Multiply by tiles of one size, with the inputs in `num_parts` parts."""
    (num_rows, size), num_outputs = x.shape, weight.shape[0]
    assert x.dtype.itemsize == 2
    assert x.stride(1) == 1
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype, device=x.device)
    parts = out
    if num_parts > 1:
        parts = torch.empty((num_parts, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    layout = layout_of(weight, tile.rows)
    steps = size // layout["DEPTH"]
    group_linear_kernel[(cdiv(num_rows, tile.rows), cdiv(num_outputs, tile.columns), num_parts)](
        *(parts, x, *pointers_of(weight), out if bias is None else bias),
        *(num_rows, num_outputs, x.stride(0), weight.codes.stride(0), steps, cdiv(steps, num_parts)),
        **layout,
        HAS_BIAS=bias is not None and num_parts == 1,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=NUM_STAGES[tile.rows],
    )
    if num_parts > 1:
        add_parts_kernel[(num_rows, cdiv(num_outputs, _SUM_COLUMNS))](
            *(out, parts, out if bias is None else bias, num_rows, num_outputs),
            PARTS=num_parts,
            HAS_BIAS=bias is not None,
            COLUMNS=_SUM_COLUMNS,
        )
    return out


def expand(weight: GroupTensor, dtype: torch.dtype) -> Float[Tensor, "out n"]:
    """Return the result of `expand_groups`, by one launch."""
    out, size = weight.shape
    layout = layout_of(weight, rows=1)
    values = torch.empty((out, size), dtype=dtype, device=weight.codes.device)
    expand_groups_kernel[(size // layout["DEPTH"], cdiv(out, _EXPANDED_COLUMNS))](
        *(values, *pointers_of(weight), out, size, weight.codes.stride(0)), **layout, COLUMNS=_EXPANDED_COLUMNS
    )
    return values


@triton.jit(do_not_specialize=["num_rows", "steps", "part_steps"])
@no_type_check
def group_linear_kernel(
    out_ptr,  # [rows, outputs], contiguous; with several parts, [parts, rows, outputs] fp32
    x_ptr,  # [rows, n] of 16 bits; rows of `x_stride`
    codes_ptr,  # [outputs, code_stride] uint8
    scales_ptr,  # [groups, outputs], contiguous
    offsets_ptr,  # the same; unused without OFFSETS
    table_ptr,  # [16] fp32; unused without a table
    bias_ptr,  # [outputs]; unused without HAS_BIAS
    num_rows,
    num_outputs,
    x_stride,
    code_stride,
    steps,  # of a row, each of DEPTH inputs
    part_steps,
    CODES: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    first = part * part_steps
    acc = multiply_groups(
        x_ptr + row.to(tl.int64) * x_stride,
        row < num_rows,
        codes_ptr,
        scales_ptr,
        offsets_ptr,
        table_ptr,
        table_ptr,
        column,
        num_outputs,
        code_stride,
        first,
        tl.minimum(first + part_steps, steps),
        CODES,
        OFFSETS,
        GROUP,
        False,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_row = out_ptr + (part * num_rows + row).to(tl.int64) * num_outputs
    mask = (column < num_outputs)[:, None] & (row < num_rows)[None, :]
    tl.store(out_row[None, :] + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def add_parts_kernel(
    out_ptr,  # [rows, outputs], contiguous
    parts_ptr,  # [PARTS, rows, outputs] fp32, contiguous
    bias_ptr,  # [outputs]; unused without HAS_BIAS
    num_rows,
    num_outputs,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < num_outputs
    acc = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        start = (part * num_rows + row).to(tl.int64) * num_outputs
        acc += tl.load(parts_ptr + start + column, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * num_outputs + column, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def expand_groups_kernel(
    out_ptr,  # [outputs, size] of 16 bits, contiguous
    codes_ptr,  # this and the next three: as in `group_linear_kernel`
    scales_ptr,
    offsets_ptr,
    table_ptr,
    num_outputs,
    size,
    code_stride,
    CODES: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    step = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    is_halved: tl.constexpr = (CODES == "int4") or (CODES == "table4")
    width: tl.constexpr = DEPTH // 2 if is_halved else DEPTH
    byte = tl.arange(0, width)
    mask = (column < num_outputs)[:, None]
    code_ptrs = codes_ptr + column.to(tl.int64)[:, None] * code_stride + (step * width + byte)[None, :]
    bits = tl.load(code_ptrs, mask=mask, other=0).to(tl.int16)
    at = step * DEPTH
    scale = spread_groups(scales_ptr, at, column, num_outputs, GROUP, COLUMNS, DEPTH, width)
    offset = scale
    if OFFSETS != "none":
        offset = spread_groups(offsets_ptr, at, column, num_outputs, GROUP, COLUMNS, DEPTH, width)
    depth = byte // 16 * 32 + byte % 16 if is_halved else byte
    out_ptrs = out_ptr + column.to(tl.int64)[:, None] * size + (at + depth)[None, :]
    low = group_values(bits & 15 if is_halved else bits, scale, offset, table_ptr, dtype, CODES, OFFSETS)
    tl.store(out_ptrs, low, mask=mask)
    if is_halved:
        high = group_values(bits >> 4, scale, offset, table_ptr, dtype, CODES, OFFSETS)
        tl.store(out_ptrs + 16, high, mask=mask)
