"""Linear layers over weights that oneDNN laid out in advance: about twice as fast as `F.linear` for a few rows.

The two `mkldnn` operators are private to torch: this file is the only place that names them, checks a pack by running
it once, and falls back to `F.linear` on the plain weight. A packed tensor has no storage and can't be pickled: pack in
the process that computes, and don't keep the plain weight (`PackedWeight.plain` is None then).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

#: The number of rows oneDNN is told to expect. It changes the layout, and so the speed at other row counts.
ROWS_HINT = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in], either in oneDNN's own layout or plain: exactly one of the two is set."""

    out_features: int
    in_features: int
    packed: Tensor | None = None
    plain: Tensor | None = None


def packed_linear(
    x: Float[Tensor, "*rows in_features"], weight: PackedWeight, bias: Float[Tensor, " out_features"] | None = None
) -> Float[Tensor, "*rows out_features"]:
    if weight.packed is None:
        assert weight.plain is not None
        return F.linear(x, weight.plain, bias)
    return _pointwise(x, weight.packed, bias)


def pack(weight: Float[Tensor, "out_features in_features"], *, rows_hint: int = ROWS_HINT) -> PackedWeight:
    """Never fails: a weight that oneDNN refuses (no private ops, dtype, device) stays plain."""
    out_features, in_features = weight.shape
    packed = _try_pack(weight.detach(), rows_hint)
    plain = weight.detach() if packed is None else None
    return PackedWeight(out_features, in_features, packed, plain)


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
