"""bf16 linears by our own kernel (`native/linear.cpp`), over the bytes that oneDNN packed: no second copy of a weight.

An output's bits depend on its own row alone, so a request computes the same alone and in a crowd. oneDNN's layout is
its own affair: it is read only after its size and its first and last blocks were found to be what the kernel expects.
Where the CPU has matrix tiles (AMX) oneDNN is faster for many rows; `MOST_ROWS` is where the kernel leaves off there.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.cpu_info import cpu_signature
from octavo_engine.ops.native_library import native_library

MOST_ROWS = 16
_BLOCK, _UNIT, _PAIRS = 64, 16, 32  # outputs of a block and of a unit; inputs are rounded up to `_PAIRS`


class _Linear(ctypes.Structure):
    """`struct Linear` of the kernel."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A view of a packed weight, which must outlive it. `owned`: what `address` points to, directly or not."""

    library: ctypes.CDLL
    address: int  # of a `_Linear`
    in_features: int
    out_features: int
    owned: tuple[_Linear, Tensor | None]

    @property
    def gates(self) -> bool:
        """Whether gate and up are whole units, so that one call can multiply them."""
        return self.out_features % (2 * _UNIT) == 0


def native_weight(mkldnn: Any, packed: Tensor, weight: Tensor, bias: Tensor | None) -> NativeWeight | None:
    """`weight`: what `packed` was made from. None where there is no kernel for it."""
    library = native_library()
    if library is None or weight.dtype != torch.bfloat16 or not _is_expected(mkldnn, packed, weight):
        return None
    wide = None if bias is None else bias.float().contiguous()
    out_features, in_features = weight.shape
    linear = _Linear(mkldnn.data_ptr(packed), None if wide is None else wide.data_ptr(), in_features, out_features)
    return NativeWeight(library, ctypes.addressof(linear), in_features, out_features, (linear, wide))


def is_faster(rows: int) -> bool:
    return rows <= MOST_ROWS or not _has_tiles()


def native_linear(
    x: Float[Tensor, "*rows in_features"], weight: NativeWeight, dtype: torch.dtype
) -> Float[Tensor, "*rows out_features"]:
    """`dtype`: bf16, or fp32 for sums that are not rounded."""
    x = x if x.is_contiguous() else x.contiguous()
    size = weight.in_features
    out = torch.empty((*x.shape[:-1], weight.out_features), dtype=dtype)
    rows, threads = x.numel() // size, torch.get_num_threads()
    weight.library.octavo_linear(
        weight.address, x.data_ptr(), size, rows, out.data_ptr(), dtype == torch.float32, threads
    )
    return out


def native_gated(
    x: Float[Tensor, "rows in_features"], weight: NativeWeight, activation: int
) -> Float[Tensor, "rows n"]:
    x = x if x.is_contiguous() else x.contiguous()
    rows, size = x.shape
    out = torch.empty((rows, weight.out_features // 2), dtype=x.dtype)
    weight.library.octavo_linear_gated(
        weight.address, x.data_ptr(), size, rows, out.data_ptr(), activation, torch.get_num_threads()
    )
    return out


def packed_blocks(weight: Float[Tensor, "out_features in_features"]) -> Float[Tensor, "blocks pairs 64 2"]:
    """The layout in torch: blocks of 64 outputs, in each the inputs by pairs, padded with zeros."""
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, -in_features % _PAIRS, 0, -out_features % _BLOCK))
    return padded.view(-1, _BLOCK, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _is_expected(mkldnn: Any, packed: Tensor, weight: Tensor) -> bool:
    last = (len(weight) - 1) // _BLOCK * _BLOCK
    for start in (0, last):
        block = packed_blocks(weight[start : start + _BLOCK])
        block_bytes = block.numel() * block.element_size()
        if mkldnn._nbytes(packed) != (last // _BLOCK + 1) * block_bytes:
            return False
        found = ctypes.string_at(mkldnn.data_ptr(packed) + start // _BLOCK * block_bytes, block_bytes)
        if found != bytes(block.view(torch.uint8).numpy()):
            return False
    return True


@functools.cache
def _has_tiles() -> bool:
    return "amx_bf16" in cpu_signature()
