"""Normalisation over the last dimension, accumulated in fp32 for every dtype of activations.

`native/elementwise.cpp` computes the residual addition and the RMS norm in one call without a temporary. The torch
functions are the reference, and replace the kernel where it is missing. They compute
x * (weight * sqrt(n)) / hypot(|x|, sqrt(eps * n)), which takes fewer passes than squaring and averaging.
"""

import ctypes
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.native_library import kernels_for
from octavo_engine.ops.triton_devices import runs_triton


class _Norm(ctypes.Structure):
    """`struct Norm` of the kernel."""

    _fields_ = (
        ("gain", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "size")),
        ("floor_squared", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class RMSWeight:
    """A norm's weight [..., n], prepared once for `rms_norm`; a leading dimension gives each head its own weight."""

    gain: Float[Tensor, "*heads n"]  # weight * sqrt(n), fp32
    floor: Float[Tensor, ""]  # sqrt(eps * n), fp32
    native: _Norm


def rms_weight(weight: Float[Tensor, "*heads n"], eps: float) -> RMSWeight:
    size = weight.shape[-1]
    gain = (weight.float() * math.sqrt(size)).contiguous()
    floor = weight.new_tensor(math.sqrt(eps * size), dtype=torch.float32)
    native = _Norm(gain.data_ptr(), gain.numel() // size, size, eps * size)
    return RMSWeight(gain, floor, native)


def rms_norm(x: Float[Tensor, "*rows n"], weight: RMSWeight) -> Float[Tensor, "*rows n"]:
    if runs_triton(x):
        return _call_triton(x.contiguous(), None, weight)
    library = kernels_for(x)
    stride = _row_stride(x, weight)
    if library is None or stride is None:
        return rms_norm_reference(x, weight)
    return _call(library, x, stride, None, weight)


def add_rms_norm(
    x: Float[Tensor, "rows n"], residual: Float[Tensor, "rows n"], weight: RMSWeight
) -> Float[Tensor, "rows n"]:
    """Add `x` to `residual` in place; return the norm of the sum."""
    if runs_triton(residual) and residual.is_contiguous():
        return _call_triton(residual, x.contiguous(), weight)
    library = kernels_for(residual)
    if library is None or x.dtype != residual.dtype or not (x.is_contiguous() and residual.is_contiguous()):
        return rms_norm(residual.add_(x), weight)
    return _call(library, residual, x.shape[1], x.data_ptr(), weight)


def rms_norm_reference(x: Float[Tensor, "*rows n"], weight: RMSWeight) -> Float[Tensor, "*rows n"]:
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(weight.floor)
    return (wide * weight.gain).div_(length).to(x.dtype)


def layer_norm(
    x: Float[Tensor, "rows n"], weight: Float[Tensor, " n"] | None, bias: Float[Tensor, " n"] | None, eps: float
) -> Float[Tensor, "rows n"]:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _row_stride(x: Tensor, weight: RMSWeight) -> int | None:
    """Return the stride of rows [n], or [heads, n] if each head has a weight; None if a row is not contiguous."""
    inner = weight.gain.dim()
    if x.is_contiguous():
        return weight.gain.numel()
    is_run = x.dim() == inner + 1 and x.stride(-1) == 1 and (inner == 1 or x.stride(1) == x.shape[2])
    return x.stride(0) if is_run else None


def _call_triton(x: Tensor, update: Tensor | None, weight: RMSWeight) -> Tensor:
    from octavo_engine.ops.triton import elementwise  # Triton is missing on most machines without a GPU

    return elementwise.rms_norm(x, weight.gain, weight.native.floor_squared, update)


def _call(library: ctypes.CDLL, x: Tensor, stride: int, update: int | None, weight: RMSWeight) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x.numel() // weight.gain.numel()
    library.octavo_norm(
        ctypes.addressof(weight.native),
        x.data_ptr(),
        stride,
        update,
        rows,
        out.data_ptr(),
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out
