"""Linear layers over weights that are packed when loaded: in our own kernel's layout (bf16), oneDNN's, or plain.

An ARM CPU with bf16 instructions multiplies many rows faster with oneDNN than with our kernel. Only on such a CPU is a
bf16 weight kept in both layouts; otherwise it is in memory once.

oneDNN's operators are private to torch: only this module calls them, checks each packed weight by running it once, and
falls back to `F.linear` on the plain weight. A packed tensor has no storage and cannot be pickled: pack in the process
that computes, and do not keep the plain weight (`PackedWeight.plain` is then None).
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.activation import Activation, act_mul
from octavo_engine.ops.cpu_level import cpu_features
from octavo_engine.ops.native_linear import NativeWeight, native_gated, native_linear, native_weight, prefer_huge_pages

#: The number of input rows for which oneDNN optimises a weight's layout; it also affects the speed at other numbers.
ROWS_HINT = 64
#: The most rows for which our kernel is faster than oneDNN with matrix instructions.
MOST_ROWS = 16
#: The most multiply-adds for which one thread is faster than waking several (some 60 µs).
MOST_OF_ONE_THREAD = 2 << 20
_MATRIX_FEATURE = "bf16"  # of ARM, as Linux names it
_WIDE_CHUNK_BYTES = 1 << 20  # fp32 bytes of a weight converted at a time: small enough to stay in the CPU cache


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in]: plain, in oneDNN's layout (`packed`), in our kernel's layout (`native`), or in both."""

    out_features: int
    in_features: int
    bias: Tensor | None = None
    packed: Tensor | None = None
    plain: Tensor | None = None
    native: NativeWeight | None = None

    @property
    def num_layouts(self) -> int:
        """The number of packed copies of the weight in memory."""
        return (self.packed is not None) + (self.native is not None)


def packed_linear(x: Float[Tensor, "*rows in_features"], weight: PackedWeight) -> Float[Tensor, "*rows out_features"]:
    if weight.native is not None and _prefers_native(weight, x.numel() // weight.in_features):
        return native_linear(x, weight.native, x.dtype)
    if weight.packed is None:
        assert weight.plain is not None
        return F.linear(x, weight.plain, weight.bias)
    return _pointwise(x, weight.packed, weight.bias)


def small_linear(x: Float[Tensor, "rows in_features"], weight: PackedWeight) -> Float[Tensor, "rows out_features"]:
    """Multiply between operators of torch: our kernel uses one thread if waking the others would take longer."""
    if weight.native is None or len(x) * weight.in_features * weight.out_features > MOST_OF_ONE_THREAD:
        return packed_linear(x, weight)
    return native_linear(x, weight.native, x.dtype, num_threads=1)


def wide_linear(x: Float[Tensor, "rows in_features"], weight: PackedWeight) -> Float[Tensor, "rows out_features"]:
    """Multiply with fp32 outputs, without rounding sums to 16 bits. Needs a weight that was packed with `wide`."""
    if weight.native is not None:
        return native_linear(x, weight.native, torch.float32)
    if x.dtype == torch.float32:
        return packed_linear(x, weight)
    assert weight.plain is not None, "a weight of 16 bits must be packed with wide=True to be multiplied in fp32"
    if x.is_cpu:
        return _chunked_linear(x.float(), weight.plain, weight.bias)
    out = torch.mm(x, weight.plain.t(), out_dtype=torch.float32)  # not available on a CPU
    return out if weight.bias is None else out.add_(weight.bias)


def gated_linear(
    x: Float[Tensor, "rows in_features"], weight: PackedWeight, activation: Activation
) -> Float[Tensor, "rows n"]:
    """Apply the layer and then the gated activation; the first half of the layer's outputs is the gate."""
    native = weight.native
    if native is not None and native.gated and activation.native is not None and _prefers_native(weight, len(x)):
        return native_gated(x, native, activation.native)
    return act_mul(packed_linear(x, weight), activation)


def pack(
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
    *,
    wide: bool = False,
    gated: bool = False,
    rows_hint: int = ROWS_HINT,
) -> PackedWeight:
    """Pack a weight; it stays plain if neither our kernel nor oneDNN supports it.

    `wide`: for `wide_linear` only. `gated`: also for `gated_linear`, whose activation our kernel then computes.
    """
    weight = weight.detach()
    native = native_weight(weight, bias, gated=gated)
    packed = _try_pack(weight, rows_hint) if _needs_onednn(weight, native, wide) else None
    if native is None and packed is None:
        return plain_weight(weight, bias)
    return PackedWeight(len(weight), weight.shape[1], bias=bias, packed=packed, native=native)


def num_layouts(dtype: torch.dtype, *, wide: bool = False) -> int:
    """Return how many packed copies `pack` makes of a weight of this dtype on this machine; 0: it packs none."""
    return pack(torch.zeros(16, 16, dtype=dtype), wide=wide).num_layouts


def plain_weight(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    return PackedWeight(len(weight), weight.shape[1], bias=bias, plain=weight)


def _prefers_native(weight: PackedWeight, rows: int) -> bool:
    return weight.packed is None or rows <= MOST_ROWS


def _needs_onednn(weight: Tensor, native: NativeWeight | None, wide: bool) -> bool:
    if native is not None:
        return not wide and _has_matrix_instructions()
    return not wide or weight.dtype == torch.float32  # oneDNN rounds sums to the dtype of the weight


def _has_matrix_instructions() -> bool:
    return _MATRIX_FEATURE in cpu_features()


def _chunked_linear(x: Tensor, plain: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in fp32, converting some rows of the weight at a time: a whole vocabulary would take gigabytes."""
    out_features, in_features = plain.shape
    step = min(out_features, max(1, _WIDE_CHUNK_BYTES // (4 * in_features)))
    chunk = torch.empty((step, in_features), dtype=torch.float32, device=plain.device)
    out = torch.empty((len(x), out_features), dtype=torch.float32, device=plain.device)
    for start in range(0, out_features, step):
        part = plain[start : start + step]
        out[:, start : start + step] = F.linear(x, chunk[: len(part)].copy_(part))
    return out if bias is None else out.add_(bias)


def _try_pack(weight: Tensor, rows_hint: int) -> Tensor | None:
    """Pack the weight in oneDNN's layout, on huge pages; return None if oneDNN rejects its type, device or shape."""
    if weight.device.type != "cpu":
        return None
    try:
        if not _dtype_is_fast(weight.dtype):
            return None
        packed: Tensor = _mkldnn()._reorder_linear_weight(weight.contiguous(), rows_hint)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        if _pointwise(probe, packed, None).shape != (1, weight.shape[0]):
            return None
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return None
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError, TypeError):
        prefer_huge_pages(_mkldnn().data_ptr(packed), _mkldnn()._nbytes(packed))
    return packed


def _pointwise(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = _mkldnn()._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _dtype_is_fast(dtype: torch.dtype) -> bool:
    """Return True if oneDNN computes this dtype on this CPU without emulation."""
    if dtype == torch.bfloat16:
        return bool(_mkldnn()._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(_mkldnn()._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _mkldnn() -> Any:
    return torch.ops.mkldnn
