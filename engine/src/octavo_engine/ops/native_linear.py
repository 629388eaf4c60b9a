"""bf16 linears by our own kernel (`native/linear.cpp`), over a layout that this module packs itself.

The layout is the same on every CPU, so the kernel does not depend on oneDNN's layout. An output's bits depend only on
its own row: a request gets the same result alone and in a batch. A CPU with matrix instructions multiplies many rows
faster with oneDNN; `ops.packed_linear` selects one of the two.
"""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.huge_pages import prefer_huge_pages
from octavo_engine.ops.native_library import native_library

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
    """A weight in the kernel's layout. `owned` keeps alive the memory that `address` points to."""

    library: ctypes.CDLL
    address: int  # of a `_Linear`
    in_features: int
    out_features: int
    owned: tuple[_Linear, Tensor, Tensor | None]

    @property
    def gates(self) -> bool:
        """True if the gate and up halves of the outputs are whole units, so that `native_gated` supports them."""
        return self.out_features % (2 * _UNIT) == 0


def native_weight(weight: Tensor, bias: Tensor | None) -> NativeWeight | None:
    """Pack a copy of the weight [out, in]; return None if there is no kernel for its type or device."""
    library = native_library()
    if library is None or weight.dtype != torch.bfloat16 or not weight.is_cpu:
        return None
    blocks = packed_blocks(weight)
    prefer_huge_pages(blocks.data_ptr(), blocks.nbytes)
    wide = None if bias is None else bias.float().contiguous()
    out_features, in_features = weight.shape
    linear = _Linear(blocks.data_ptr(), None if wide is None else wide.data_ptr(), in_features, out_features)
    return NativeWeight(library, ctypes.addressof(linear), in_features, out_features, (linear, blocks, wide))


def native_linear(
    x: Float[Tensor, "*rows in_features"], weight: NativeWeight, dtype: torch.dtype
) -> Float[Tensor, "*rows out_features"]:
    """Apply the linear layer. `dtype`: the type of the output, bf16, or fp32 if sums must not be rounded."""
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


def packed_blocks(
    weight: BFloat16[Tensor, "out_features in_features"],
) -> BFloat16[Tensor, "blocks pairs 64 2"]:
    """Return a copy in the kernel's layout: blocks of 64 outputs, each with the inputs in pairs, padded with zeros."""
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, -in_features % _PAIRS, 0, -out_features % _BLOCK)).contiguous()
    pairs = padded.view(torch.int32).view(
        -1, _BLOCK, padded.shape[1] // 2
    )  # a pair in one piece copies three times faster
    return pairs.transpose(1, 2).contiguous().view(torch.bfloat16).view(len(pairs), -1, _BLOCK, 2)
