"""Linear layers over weights laid out in advance by oneDNN: our own kernel in bf16 where it can, else oneDNN's.

oneDNN's operators are private to torch: this file is the only place that names them, checks a pack by running it once,
and falls back to `F.linear` on the plain weight. A packed tensor has no storage and can't be pickled: pack in the
process that computes, and don't keep the plain weight (`PackedWeight.plain` is None then).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.activation import Activation, act_mul
from octavo_engine.ops.huge_pages import prefer_huge_pages
from octavo_engine.ops.native_linear import NativeWeight, is_faster, native_gated, native_linear, native_weight

#: The number of rows oneDNN is told to expect. It changes the layout, and so the speed at other row counts.
ROWS_HINT = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in], either in oneDNN's own layout or plain: exactly one of the two is set.

    `native`: our kernel's view of the packed one.
    """

    out_features: int
    in_features: int
    bias: Tensor | None = None
    packed: Tensor | None = None
    plain: Tensor | None = None
    native: NativeWeight | None = None


def packed_linear(x: Float[Tensor, "*rows in_features"], weight: PackedWeight) -> Float[Tensor, "*rows out_features"]:
    if weight.native is not None and is_faster(x.numel() // weight.in_features):
        return native_linear(x, weight.native, x.dtype)
    if weight.packed is None:
        assert weight.plain is not None
        return F.linear(x, weight.plain, weight.bias)
    return _pointwise(x, weight.packed, weight.bias)


def wide_linear(x: Float[Tensor, "rows in_features"], weight: PackedWeight) -> Float[Tensor, "rows out_features"]:
    """In fp32. Our kernel doesn't round its sums; without it, they are rounded to the type of the weight first."""
    return packed_linear(x, weight).float() if weight.native is None else native_linear(x, weight.native, torch.float32)


def gated_linear(
    x: Float[Tensor, "rows in_features"], weight: PackedWeight, activation: Activation
) -> Float[Tensor, "rows n"]:
    """`act_mul` of the linear, the gate being the first half of the outputs."""
    native = weight.native
    if native is not None and native.gates and activation.native is not None and is_faster(len(x)):
        return native_gated(x, native, activation.native)
    return act_mul(packed_linear(x, weight), activation)


def pack(
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
    *,
    rows_hint: int = ROWS_HINT,
) -> PackedWeight:
    """Never fails: a weight that oneDNN refuses (no private ops, dtype, device) stays plain."""
    weight = weight.detach()
    packed = _try_pack(weight, rows_hint)
    if packed is None:
        return plain_weight(weight, bias)
    native = _try_native(packed, weight, bias)
    return PackedWeight(len(weight), weight.shape[1], bias=bias, packed=packed, native=native)


def packs(dtype: torch.dtype) -> bool:
    """Whether weights of this type are laid out anew on this machine: then a tied head is a copy."""
    return _try_pack(torch.zeros(16, 16, dtype=dtype), ROWS_HINT) is not None


def plain_weight(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    return PackedWeight(len(weight), weight.shape[1], bias=bias, plain=weight)


def _try_pack(weight: Tensor, rows_hint: int) -> Tensor | None:
    if weight.device.type != "cpu":
        return None
    try:
        if not _dtype_is_fast(weight.dtype):
            return None
        packed: Tensor = _mkldnn()._reorder_linear_weight(weight.contiguous(), rows_hint)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        return packed if _pointwise(probe, packed, None).shape == (1, weight.shape[0]) else None
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return None


def _try_native(packed: Tensor, weight: Tensor, bias: Tensor | None) -> NativeWeight | None:
    """Reads where the packed bytes are, which moves them to huge pages in passing: oneDNN, too, is faster there."""
    try:
        prefer_huge_pages(_mkldnn().data_ptr(packed), _mkldnn()._nbytes(packed))
        return native_weight(_mkldnn(), packed, weight, bias)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return None


def _pointwise(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = _mkldnn()._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _dtype_is_fast(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes this type on this CPU rather than refusing or emulating it."""
    if dtype == torch.bfloat16:
        return bool(_mkldnn()._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(_mkldnn()._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _mkldnn() -> Any:
    return torch.ops.mkldnn
