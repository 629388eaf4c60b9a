"""RMS norm with residual addition, gated activation, and penalties of logits; each is one kernel launch."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.ops.triton.sizes import cdiv, next_power_of_2

_SILU = tl.constexpr(0)  # the numbers of `Activation.native`; 1 is the tanh form of gelu
_GATE_COLUMNS = 1024
_PENALTY_COLUMNS = 2048
_MOST_COUNTED = tl.constexpr(32767)
_BOUND = tl.constexpr(80.0)  # keeps the exponential finite; sigmoid is 0 or 1 there
_ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)


def rms_norm(
    x: Float[Tensor, "*rows n"], gain: Float[Tensor, "*heads n"], floor_squared: float, update: Tensor | None = None
) -> Float[Tensor, "*rows n"]:
    """Return x * gain / sqrt(|x|² + floor_squared), where row i of `x` has row i % heads of `gain`.

    `update` is first added to `x`, in place. `x` and `update` are contiguous.
    """
    size = x.shape[-1]
    out = torch.empty_like(x)
    row = next_power_of_2(size)
    rms_norm_kernel[(x.numel() // size,)](
        *(out, x, x if update is None else update, gain, gain.numel() // size, floor_squared),
        SIZE=size,
        ROW=row,
        HAS_UPDATE=update is not None,
        num_warps=min(16, max(1, row // 512)),
    )
    return out


def gate(gate_up: Float[Tensor, "rows two_n"], activation: int) -> Float[Tensor, "rows n"]:
    """Return the activation of the first half of each row times its second half. Rows may be strided."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    gate_kernel[(rows, cdiv(size, _GATE_COLUMNS))](
        *(out, gate_up, gate_up.stride(0)), SIZE=size, COLUMNS=_GATE_COLUMNS, ACTIVATION=activation
    )
    return out


def penalise(
    logits: Float[Tensor, "rows vocab"],
    counts: Int[Tensor, "slots vocab"],
    params: Int[Tensor, "penalised 6"],
    newest: Int[Tensor, " slots"],
) -> None:
    """Count each penalised row's newest token, then penalise its logits in place, as `PenaltyCounts` defines."""
    vocab = logits.shape[1]
    assert logits.stride(1) == 1
    penalise_kernel[(len(params), cdiv(vocab, _PENALTY_COLUMNS))](
        *(logits, counts, params, newest, logits.stride(0)),
        VOCAB=vocab,
        COLUMNS=_PENALTY_COLUMNS,
        enable_fp_fusion=False,
    )


@triton.jit
@no_type_check
def rms_norm_kernel(
    out_ptr,  # [rows, SIZE], contiguous
    x_ptr,  # the same; the sum is stored here, if there is an update
    update_ptr,  # the same
    gain_ptr,  # [heads, SIZE] fp32
    heads,
    floor_squared,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.arange(0, ROW)
    mask = at < SIZE
    x = tl.load(x_ptr + row * SIZE + at, mask=mask, other=0.0)
    if HAS_UPDATE:
        update = tl.load(update_ptr + row * SIZE + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row * SIZE + at, x, mask=mask)
    wide = x.to(tl.float32)
    gain = tl.load(gain_ptr + row % heads * SIZE + at, mask=mask, other=0.0)
    out = wide * gain / tl.sqrt(tl.sum(wide * wide, 0) + floor_squared)
    tl.store(out_ptr + row * SIZE + at, out.to(x.dtype), mask=mask)


@triton.jit
@no_type_check
def gate_kernel(
    out_ptr,  # [rows, SIZE], contiguous
    gate_up_ptr,  # [rows, 2 * SIZE]; rows of `stride`
    stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = at < SIZE
    x = tl.load(gate_up_ptr + row * stride + at, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + row * stride + SIZE + at, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if ACTIVATION == _SILU:
        acted = wide * tl.sigmoid(tl.clamp(wide, -_BOUND, _BOUND))
    else:
        inner = _ROOT_2_OVER_PI * (wide + 0.044715 * wide * wide * wide)
        acted = wide * tl.sigmoid(tl.clamp(2.0 * inner, -_BOUND, _BOUND))  # 0.5 * (1 + tanh(inner))
    acted = acted.to(x.dtype).to(tl.float32)  # torch rounds it, too
    tl.store(out_ptr + row * SIZE + at, (acted * up.to(tl.float32)).to(x.dtype), mask=mask)


@triton.jit
@no_type_check
def penalise_kernel(
    logits_ptr,  # [rows, VOCAB] fp32; rows of `stride`
    counts_ptr,  # [slots, VOCAB] int16, contiguous
    params_ptr,  # [penalised rows, 6] int32: of `PenaltyCounts.entry`
    newest_ptr,  # [slots] int64
    stride,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    params = params_ptr + tl.program_id(0) * 6
    slot = tl.load(params + 1).to(tl.int64)
    token = tl.load(params + 2)
    if token == -1:
        token = tl.load(newest_ptr + slot).to(tl.int32)
    repetition = tl.load(params + 3).to(tl.float32, bitcast=True)
    frequency = tl.load(params + 4).to(tl.float32, bitcast=True)
    presence = tl.load(params + 5).to(tl.float32, bitcast=True)
    ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    counts = counts_ptr + slot * VOCAB + ids
    count = tl.load(counts, mask=ids < VOCAB, other=0).to(tl.int32)
    is_new = ids == token
    count = tl.where(is_new, tl.minimum(tl.maximum(count, 0) + 1, _MOST_COUNTED), count)
    tl.store(counts, count.to(tl.int16), mask=is_new)
    logits = logits_ptr + tl.load(params).to(tl.int64) * stride + ids
    x = tl.load(logits, mask=ids < VOCAB, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x -= frequency * tl.maximum(count, 0).to(tl.float32) + presence * (count > 0).to(tl.float32)
    tl.store(logits, x, mask=(ids < VOCAB) & (count != 0))
