"""Linear layers in FP8 (e4m3) for the tensor cores of sm_89 and later: weights and activations are both rounded.

A first launch rounds the rows of activations, with one scale per row, or one per 128 inputs if the weight has groups of
128. torch multiplies rows with one scale if it supports device, dtypes and shape. A Triton kernel multiplies in all
other cases: it scales the product of every 128 inputs and adds it in fp32.

torch's operator is private: only `_scaled_product` calls it, and `prepare_fp8` first tries it with each weight.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.group_tensor import ROUNDED_GROUP, GroupTensor
from octavo_engine.ops.triton.expert_linear import Tile
from octavo_engine.ops.triton.sizes import cdiv, next_power_of_2

#: After this many inputs, the kernel scales the product of the tensor cores and adds it to an fp32 sum.
DEPTH = ROUNDED_GROUP
_ROUNDED_VALUES = 4096  # values per program, if it rounds several groups
_MOST = tl.constexpr(448.0)  # the largest number of e4m3
_LEAST = tl.constexpr(1e-30)  # lower bound of a group's largest value, so that the scale is not zero
_INFINITY = tl.constexpr(float("inf"))
#: The weight is the first operand: an MMA of a warp group takes at least 64 of its outputs, but as few as 8 rows.
TILES = (Tile(16, 64, 4), Tile(64, 128, 8), Tile(128, 128, 8))
_STAGES = {16: 5, 64: 4, 128: 3}  # pipeline stages by a tile's rows: at most 99 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Weight:
    """A weight [out, in]. `input_scale`: scale of all rows; None: one per row. `has_product`: torch multiplies."""

    codes: Tensor  # e4m3
    scales: Float[Tensor, "groups out"]
    bias: Tensor | None
    input_scale: float | None
    has_product: bool = False


def prepare_fp8(weight: GroupTensor, bias: Tensor | None, dtype: torch.dtype, input_scale: float | None) -> FP8Weight:
    """Choose torch or the kernel for a weight and rows of a dtype; compile the kernel for all numbers of rows.

    `input_scale`: scale of the rows, used only with a weight of one group.
    """
    codes, num_groups = weight.codes.view(torch.float8_e4m3fn), len(weight.scales)
    scales, input_scale = (weight.scales.float(), input_scale) if num_groups == 1 else (weight.scales, None)
    row = torch.zeros((1, codes.shape[1]), dtype=dtype, device=codes.device)
    operands = (*round_rows(row, num_groups, input_scale), codes, scales, bias, dtype)
    has_product = num_groups == 1 and _has_product(*operands)
    for tile in () if has_product else TILES:
        scaled_product(*operands, tile)
    return FP8Weight(codes=codes, scales=scales, bias=bias, input_scale=input_scale, has_product=has_product)


def fp8_linear(x: Float[Tensor, "rows in_features"], weight: FP8Weight) -> Float[Tensor, "rows out"]:
    """Round the rows and multiply. A row with an infinite or NaN value gives NaN, and does not affect other rows."""
    codes, scales = round_rows(x, len(weight.scales), weight.input_scale)
    product = _scaled_product if weight.has_product else scaled_product
    return product(codes, scales, weight.codes, weight.scales, weight.bias, x.dtype)


def round_rows(
    x: Float[Tensor, "rows in_features"], num_groups: int, given_scale: float | None = None
) -> tuple[Tensor, Float[Tensor, "rows groups"]]:
    """Return the e4m3 codes and the scales of each row's groups. `given_scale`: scale of all groups, so that values
    above 448 times this scale are clipped; None: computed per group."""
    (rows, size), group_size = x.shape, x.shape[1] // num_groups
    assert x.stride(1) == 1
    codes = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, num_groups), dtype=torch.float32, device=x.device)
    width = next_power_of_2(group_size)
    groups = max(1, min(next_power_of_2(num_groups), _ROUNDED_VALUES // width))
    round_rows_kernel[(rows, cdiv(num_groups, groups))](
        *(codes, scales, x, x.stride(0), 1.0 if given_scale is None else given_scale),
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group_size,
        GROUPS=groups,
        WIDTH=width,
        IS_GIVEN=given_scale is not None,
        num_warps=min(16, max(1, groups * width // 512)),
    )
    return codes, scales


def scaled_product(
    x: Tensor,
    x_scales: Float[Tensor, "rows groups"],
    weight: Tensor,
    scales: Float[Tensor, "groups out"],
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Float[Tensor, "rows out"]:
    """Multiply e4m3 codes with scales of one group, or of groups of 128 inputs."""
    (rows, in_features), out_features, num_groups = x.shape, len(weight), len(scales)
    assert num_groups in (1, cdiv(in_features, DEPTH))
    tile = tile or next((each for each in TILES if rows <= each.rows), TILES[-1])
    out = torch.empty((rows, out_features), dtype=dtype, device=x.device)
    fp8_linear_kernel[(cdiv(out_features, tile.columns), cdiv(rows, tile.rows))](
        *(out, x, x_scales, weight, scales, out if bias is None else bias, rows),
        OUT=out_features,
        IN=in_features,
        GROUPS=num_groups,
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        OUTPUTS=tile.columns,
        STEP=DEPTH,
        num_warps=tile.num_warps,
        num_stages=_STAGES[tile.rows],
    )
    return out


def _has_product(x: Tensor, *operands: Any) -> bool:
    try:
        return _scaled_product(x, *operands).shape == (1, len(operands[1]))
    except (RuntimeError, ValueError, AttributeError, NotImplementedError, TypeError):
        return False


def _scaled_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply by torch's operator with a scale for each row and each output."""
    out: Tensor = torch._scaled_mm(x, weight.t(), scale_a=x_scales, scale_b=scales, bias=bias, out_dtype=dtype)
    return out


@triton.jit
@no_type_check
def round_rows_kernel(
    codes_ptr,  # [rows, NUM_GROUPS * GROUP_SIZE] e4m3, contiguous
    scales_ptr,  # [rows, NUM_GROUPS] fp32, contiguous
    x_ptr,  # [rows, NUM_GROUPS * GROUP_SIZE]; rows of `stride`
    stride,
    given_scale,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,  # of a program
    WIDTH: tl.constexpr,  # GROUP_SIZE, or the next power of two
    IS_GIVEN: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, WIDTH)
    at = group[:, None] * GROUP_SIZE + place[None, :]
    mask = (group < NUM_GROUPS)[:, None] & (place < GROUP_SIZE)[None, :]
    x = tl.load(x_ptr + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(tl.abs(x) < _INFINITY, x, float("nan"))
    if IS_GIVEN:
        scale = tl.full([GROUPS], 1.0, tl.float32) * given_scale
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 1), _LEAST) / _MOST
    x = tl.clamp(x * (1.0 / scale)[:, None], -_MOST, _MOST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes_ptr + row * (NUM_GROUPS * GROUP_SIZE) + at, x.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def fp8_linear_kernel(
    out_ptr,  # [rows, OUT], contiguous
    x_ptr,  # [rows, IN] e4m3, contiguous
    x_scales_ptr,  # [rows, GROUPS] fp32
    weight_ptr,  # [OUT, IN] e4m3, contiguous
    scales_ptr,  # [GROUPS, OUT]
    bias_ptr,  # [OUT]; unused without HAS_BIAS
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,  # 1, or one for each STEP inputs
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = (output < OUT)[:, None] & (row < rows)[None, :]
    places = row.to(tl.int64)[None, :] * OUT + output[:, None]
    output, row = tl.minimum(output, OUT - 1), tl.minimum(row, rows - 1)  # repeats the last: needs no masks
    depth = tl.arange(0, STEP)
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * IN + depth[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * IN + depth[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for at in range(0, IN, STEP):
        if IN % STEP == 0:
            weight, x = tl.load(weight_ptrs + at), tl.load(x_ptrs + at)
        else:
            weight = tl.load(weight_ptrs + at, mask=(depth + at < IN)[None, :], other=0.0)
            x = tl.load(x_ptrs + at, mask=(depth + at < IN)[:, None], other=0.0)
        product = tl.dot(weight, x, max_num_imprecise_acc=STEP)  # sums of the tensor cores of sm_90 have fewer bits
        if GROUPS > 1:
            scale = tl.load(scales_ptr + at // STEP * OUT + output).to(tl.float32)
            x_scale = tl.load(x_scales_ptr + row * GROUPS + at // STEP)
            product = product * scale[:, None] * x_scale[None, :]
        acc += product
    if GROUPS == 1:
        acc = acc * tl.load(scales_ptr + output).to(tl.float32)[:, None] * tl.load(x_scales_ptr + row)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output).to(tl.float32)[:, None]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)
