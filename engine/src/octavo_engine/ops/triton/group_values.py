"""Decodes group-quantised weights in Triton kernels: the values of codes, and the loop that multiplies them.

A 4-bit code becomes a float without a conversion: `code | 0x4300` is 128 + code in bf16, and `code | 0x6400` is 1024 +
code in fp16. The exponent and mantissa of an e4m3 number are shifted to their places in fp32, and a factor of 2^120
corrects the exponent, so that GPUs without FP8 suffice. All of this is exact. As in `expand_groups`, the value is then
multiplied by the scale in fp32, and rounded once.
"""

from typing import Any, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor

#: Number of pipeline stages for a tile's number of rows, limited by the shared memory of a thread block.
NUM_STAGES = {16: 3, 64: 3, 128: 2}


def depth_of(weight_format: GroupFormat, size: int, rows: int) -> int:
    """Return the inputs per loop step: a divisor of the row, and a divisor or a multiple of the group size.

    `rows`: rows of a tile. Values of table4 pass through shared memory, like all loads of a loop; for large tiles, 128
    inputs would exceed it.
    """
    group, is_large = weight_format.group_size, weight_format.codes == "table4" and rows > 16
    depths = (64, 32) if is_large else (128, 64, 32)
    return next(depth for depth in depths if size % depth == 0 and (group % depth == 0 or depth % group == 0))


def layout_of(weight: GroupTensor, rows: int) -> dict[str, Any]:
    """Return the kernel arguments that describe how a weight is stored. `rows`: of a tile."""
    kind = weight.format
    depth = depth_of(kind, weight.shape[-1], rows)
    return {"CODES": kind.codes, "OFFSETS": kind.offsets, "GROUP": kind.group_size, "DEPTH": depth}


def pointers_of(weight: GroupTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales, offsets and table; other pointers replace those that a format lacks."""
    assert weight.codes.stride(-1) == 1
    assert weight.scales.is_contiguous()
    offsets = weight.scales if weight.offsets is None else weight.offsets
    assert offsets.is_contiguous()
    return weight.codes, weight.scales, offsets, weight.scales if weight.table is None else weight.table


@triton.jit
@no_type_check
def group_values(bits, scale, offset, table_ptr, DTYPE: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr):
    """Return the values of codes in a 16-bit dtype."""
    is_bf16: tl.constexpr = tl.bfloat16 == DTYPE
    if CODES == "int4":
        base: tl.constexpr = 128.0 if is_bf16 else 1024.0
        based = (bits | (0x4300 if is_bf16 else 0x6400)).to(DTYPE, bitcast=True)
        if OFFSETS == "zeros":
            number = (based - (offset + base).to(DTYPE)).to(tl.float32)
        else:
            zero: tl.constexpr = base if OFFSETS == "minimums" else base + 8.0
            number = (based - tl.full([1, 1], zero, DTYPE)).to(tl.float32)
    elif CODES == "table4":
        number = tl.load(table_ptr + bits)
    elif CODES == "int8":
        number = ((bits.to(tl.int32) ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
    else:
        number = (((bits.to(tl.int32) << 24) >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120
    value = number * scale
    if OFFSETS == "minimums":
        value += offset
    return value.to(DTYPE)


@triton.jit
@no_type_check
def spread_groups(
    values_ptr,  # [groups, num_columns]
    at,  # the first of SPAN inputs, whose codes are WIDTH bytes
    column,  # [COLUMNS]
    num_columns,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the codes' scales or offsets in fp32: [COLUMNS, WIDTH], or [COLUMNS, 1] if all are in one group."""
    is_output = column < num_columns
    if GROUP >= SPAN:
        spread = tl.load(values_ptr + (at // GROUP) * num_columns + column, mask=is_output, other=0.0)[:, None]
    else:
        count: tl.constexpr = SPAN // GROUP
        group = at // GROUP + tl.arange(0, count)
        each = values_ptr + group[None, :] * num_columns + column[:, None]
        several = tl.load(each, mask=is_output[:, None], other=0.0)[:, :, None]
        spread = tl.reshape(tl.broadcast_to(several, [COLUMNS, count, WIDTH // count]), [COLUMNS, WIDTH])
    return spread.to(tl.float32)


@triton.jit
@no_type_check
def multiply_groups(
    x_rows,  # [ROWS] pointers to the rows, of 16 bits
    is_row,  # [ROWS]
    codes_ptr,  # [num_columns, code_stride] uint8, contiguous
    scales_ptr,  # [groups, num_columns], contiguous
    offsets_ptr,  # the same; unused without OFFSETS
    table_ptr,  # [16] fp32; unused without a table
    order_ptr,  # [inputs] int32: index in a row of the weight's i-th input; unused without HAS_ORDER
    column,  # [COLUMNS]: the outputs
    num_columns,
    code_stride,
    first,  # the steps from `first` to before `last`, of DEPTH inputs
    last,
    CODES: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the product [COLUMNS, ROWS] in fp32. The weight is the first operand: wgmma can take it from registers.

    A step makes two products: one of the low and one of the high four bits of bytes, or one for each half of 8-bit
    codes. With one product, Triton would divide the inputs among warps, and several warps would expand the same code.
    """
    has_nibbles: tl.constexpr = (CODES == "int4") or (CODES == "table4")
    width: tl.constexpr = DEPTH // 2
    span: tl.constexpr = DEPTH if has_nibbles else width
    byte = tl.arange(0, width)
    depth = byte // 16 * 32 + byte % 16 if has_nibbles else byte
    code_ptrs = codes_ptr + column.to(tl.int64)[:, None] * code_stride + byte[None, :]
    is_output = (column < num_columns)[:, None]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(first, last):
        for half in tl.static_range(2):
            at = step * DEPTH
            if half == 0 or not has_nibbles:
                start = at if has_nibbles else at + half * width
                bits = tl.load(code_ptrs + (at // 2 if has_nibbles else start), mask=is_output, other=0).to(tl.int16)
                scale = spread_groups(scales_ptr, start, column, num_columns, GROUP, COLUMNS, span, width)
                offset = scale
                if OFFSETS != "none":
                    offset = spread_groups(offsets_ptr, start, column, num_columns, GROUP, COLUMNS, span, width)
            number = (bits >> (4 * half)) & 15 if has_nibbles else bits
            weight = group_values(number, scale, offset, table_ptr, x_rows.dtype.element_ty, CODES, OFFSETS)
            inputs = at + half * (16 if has_nibbles else width) + depth
            if HAS_ORDER:
                inputs = tl.load(order_ptr + inputs)
            x = tl.load(x_rows[None, :] + inputs[:, None], mask=is_row[None, :], other=0.0)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
    return acc
