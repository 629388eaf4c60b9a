"""bf16 linears by our own kernel (`native/linear.cpp`), over a layout that this module packs itself.

The layout is the same on every CPU. An output's bits depend only on its own row: a request gets the same result alone
and in a batch.
"""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.native_library import native_library

_PANEL, _UNIT, _STEP = 32, 16, 32  # outputs of a panel and of a unit; inputs of a step
_ROUNDED, _FLOAT, _ACTIVATED = range(3)  # `enum Result` of the kernel
_BFLOAT16 = 0  # of `enum Format` of the kernel
_MADV_COLLAPSE = 25
_PAGE_BYTES = 2 << 20
_LEAST_BYTES = 256 << 10  # smaller weights stay in a CPU cache


class LinearParameters(ctypes.Structure):
    """`struct Linear` of the kernel."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("gated", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight in the kernel's layout. `owned` keeps alive the memory that `address` points to.

    `gated`: the gate and up halves of the outputs alternate in memory, and `native_gated` supports the weight.
    """

    library: ctypes.CDLL
    address: int  # of `LinearParameters`, one for each part
    num_parts: int
    in_features: int
    out_features: int
    gated: bool
    owned: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Panels:
    """A part of the outputs, in the kernel's layout. `kernel_format`: `enum Format` of the kernel."""

    memory: Tensor
    shape: tuple[int, int]
    gated: bool = False
    kernel_format: int = _BFLOAT16

    def parameters(self, bias: Tensor | None = None) -> LinearParameters:
        address, bias_address = self.memory.data_ptr(), None if bias is None else bias.data_ptr()
        return LinearParameters(address, bias_address, *reversed(self.shape), self.gated, self.kernel_format)


def native_weight(weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> NativeWeight | None:
    """Pack a copy of the weight [out, in]; return None if there is no kernel for its type or device."""
    if weight.dtype != torch.bfloat16 or not weight.is_cpu:
        return None
    library = native_library()  # may compile it, which takes minutes
    if library is None:
        return None
    out_features, in_features = weight.shape
    gated = gated and can_gate(out_features)
    panels = Panels(packed_panels(weight, gated=gated), (out_features, in_features), gated)
    return native_panels(library, [panels], bias)


def can_gate(out_features: int) -> bool:
    """Return True if the halves of the outputs are whole units, so that they can alternate in memory."""
    return out_features % (2 * _UNIT) == 0


def native_panels(library: ctypes.CDLL, parts: Sequence[Panels], bias: Tensor | None) -> NativeWeight:
    """Make a weight of one or several parts, whose outputs are concatenated. Only a weight of one part can be gated."""
    for part in parts:
        prefer_huge_pages(part.memory.data_ptr(), part.memory.nbytes)
    sizes = [part.shape[0] for part in parts]
    wide = None if bias is None else bias.float().contiguous()
    biases = [None] * len(parts) if wide is None else wide.split_with_sizes(sizes)
    array = (LinearParameters * len(parts))(*map(Panels.parameters, parts, biases))
    gated, in_features = len(parts) == 1 and parts[0].gated, parts[0].shape[1]
    owned = (array, wide, *(part.memory for part in parts))
    return NativeWeight(library, ctypes.addressof(array), len(parts), in_features, sum(sizes), gated, owned)


def native_linear(
    x: Float[Tensor, "*rows in_features"], weight: NativeWeight, dtype: torch.dtype, *, num_threads: int = 0
) -> Float[Tensor, "*rows out_features"]:
    """Apply the linear layer. `dtype`: dtype of the output: bf16, or fp32 to keep the unrounded sums.

    `num_threads`: 0 for as many as torch has.
    """
    out = torch.empty((*x.shape[:-1], weight.out_features), dtype=dtype)
    _multiply(x, weight, out, _FLOAT if dtype == torch.float32 else _ROUNDED, num_threads=num_threads)
    return out


def native_gated(
    x: Float[Tensor, "rows in_features"], weight: NativeWeight, activation: int
) -> Float[Tensor, "rows n"]:
    out = torch.empty((len(x), weight.out_features // 2), dtype=x.dtype)
    _multiply(x, weight, out, _ACTIVATED, activation)
    return out


def _multiply(
    x: Tensor, weight: NativeWeight, out: Tensor, result: int, activation: int = 0, *, num_threads: int = 0
) -> None:
    x = x if x.is_contiguous() else x.contiguous()
    size, threads = weight.in_features, num_threads or torch.get_num_threads()
    weight.library.octavo_linear(
        *(weight.address, weight.num_parts, x.data_ptr(), size),
        *(x.numel() // size, out.data_ptr(), result, activation, threads),
    )


def packed_panels(
    weight: BFloat16[Tensor, "out_features in_features"], *, gated: bool = False
) -> BFloat16[Tensor, "panels steps 2 16 16 2"]:
    """Return a copy in the kernel's layout, described in `native/panels.h`, padded with zeros."""
    out_features, in_features = weight.shape
    padded = F.pad(weight, (0, -in_features % _STEP, 0, -out_features % _PANEL)).contiguous()
    pairs = padded.view(torch.int32)  # a pair in one piece copies three times faster
    steps = pairs.shape[1] // (_STEP // 2)
    units = (
        pairs.view(2, -1, _UNIT, steps, _STEP // 2).transpose(0, 1)
        if gated
        else pairs.view(-1, 2, _UNIT, steps, _STEP // 2)
    )
    return (
        units.permute(0, 3, 1, 4, 2).contiguous().view(torch.bfloat16).view(len(units), steps, 2, _STEP // 2, _UNIT, 2)
    )


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Move weights to pages of 2 MiB, together with whatever else is on the first and last of these pages.

    Every step reads all weights; with pages of 4 KiB, half of that time is spent on page table walks. Linux can
    collapse memory that is already in use (`MADV_COLLAPSE`, since 6.1). On other systems, or if Linux finds no
    contiguous 2 MiB, the pages stay as they are, without an error.
    """
    if num_bytes < _LEAST_BYTES or sys.platform != "linux":
        return
    start = address // _PAGE_BYTES * _PAGE_BYTES
    end = -(-(address + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
