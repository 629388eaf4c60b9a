"""A reference in torch for products of weights in blocks: the numbers of a block, and the bits of the kernel's sums."""

from typing import Any

import numpy as np
import torch
from octavo_engine.ops.native_quantised import QuantisedTensor
from torch import Tensor

STEP, HALF = 32, 16
_NUMBERS = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4}  # bytes before the quants
_MIDDLES = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}
_LEAST_SIZE = 2.0**-100

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def reference(x: Tensor, tensor: QuantisedTensor, *, is_fused: bool) -> Tensor:
    """Return the fp32 outputs [rows, out] with the bits that `native/linear_blocks.h` defines.

    `is_fused`: the CPU has fused multiply-adds; otherwise products are rounded, too.
    """
    quants, scales, minima = numbers_of(tensor)
    values, sizes = _rounded(x, is_fused=is_fused)
    sums = torch.zeros(len(x), len(quants))
    halves = tensor.format.name == "Q6_K"
    for step in range(quants.shape[1] // STEP):
        scale = sizes[:, step, None]
        for first, last in ((0, HALF), (HALF, STEP)) if halves else ((0, STEP),):
            part = slice(step * STEP + first, step * STEP + last)
            block = values[:, part] @ quants[:, part].T
            sums = _multiply_add(block.float(), scales[:, part.start // HALF] * scale, sums, is_fused=is_fused)
        if minima is not None:
            total = values[:, step * STEP : (step + 1) * STEP].sum(-1, keepdim=True).float()
            sums = _multiply_add(total, minima[:, step] * scale, sums, is_fused=is_fused)
    return sums


def numbers_of(tensor: QuantisedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return quants [out, in], fp32 scales [out, in / 16], and fp32 minima [out, in / 32] of formats that have some.

    weight = scale * quant + minimum; quants of formats without minima are signed.
    """
    name = tensor.format.name
    blocks = tensor.rows.numpy().reshape(len(tensor.rows), -1, tensor.format.num_bytes)
    if name.endswith("_K"):
        quants, scales, minima = _q6_k(blocks) if name == "Q6_K" else _k_type(blocks, high=name == "Q5_K")
    else:
        quants, scales = _quants(name, blocks[..., _NUMBERS[name] :]), _halves(blocks, 0).repeat(2, axis=-1)
        minima = _halves(blocks, 2) if name.endswith("_1") else None
    outputs = len(blocks)
    return (
        torch.from_numpy(quants.astype(np.int64).reshape(outputs, -1)) - _MIDDLES.get(name, 0),
        torch.from_numpy(scales.reshape(outputs, -1)),
        None if minima is None else torch.from_numpy(minima.reshape(outputs, -1)),
    )


def _halves(blocks: Bytes, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> np.ndarray:
    """Return the low halves of the last dimension's bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> np.ndarray:
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _quants(name: str, packed: Bytes) -> np.ndarray:
    if name == "Q8_0":
        return packed.view(np.int8)
    if name.startswith("Q5"):
        return _nibbles(packed[..., 4:]) | _bits(packed[..., :4]) << 4
    return _nibbles(packed)


def _k_type(blocks: Bytes, *, high: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale_bytes = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minimum_bytes = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    low = blocks[..., 48 if high else 16 :].reshape(*blocks.shape[:-1], 4, STEP)
    quants = _nibbles(low).reshape(*blocks.shape[:-1], 8, STEP)
    if high:
        of_steps = blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
        quants = quants | of_steps.swapaxes(-1, -2) << 4
    return quants, (_halves(blocks, 0) * scale_bytes).repeat(2, axis=-1), -_halves(blocks, 2) * minimum_bytes


def _q6_k(blocks: Bytes) -> tuple[np.ndarray, np.ndarray, None]:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)).reshape(*blocks.shape[:-1], 2, 4, STEP)
    packed = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, STEP)
    high = packed >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return low | high << 4, _halves(blocks, 208) * blocks[..., 192:208].view(np.int8), None


def _rounded(x: Tensor, *, is_fused: bool) -> tuple[Tensor, Tensor]:
    """Return the rounded inputs [rows, in] as int64, and their fp32 scales [rows, in / 32]."""
    steps = x.float().view(len(x), -1, STEP)
    sizes = steps.abs().amax(-1)
    is_rounded = sizes.isfinite() & (sizes >= _LEAST_SIZE)
    inverse = torch.where(is_rounded, torch.full_like(sizes, 127).div(sizes), 0)[..., None]
    products = steps.double() * inverse.double() if is_fused else steps * inverse
    values = torch.where(is_rounded[..., None], products, 0).round().long()
    scales = torch.where(is_rounded, sizes / 127, torch.where(sizes.isfinite(), 0, torch.nan))
    return values.flatten(1), scales


def _multiply_add(a: Tensor, b: Tensor, c: Tensor, *, is_fused: bool) -> Tensor:
    """Return a * b + c of fp32 numbers, rounded once if fused.

    The product is exact in fp64. The sum is rounded there to odd, so that a second rounding gives the nearest fp32.
    """
    if not is_fused:
        return a * b + c
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    is_inexact = total.isfinite() & (error != 0) & (total.view(torch.int64) % 2 == 0)
    towards = torch.where(error > 0, torch.inf, -torch.inf).double()
    return torch.where(is_inexact, torch.nextafter(total, towards), total).float()


#: The most that rounded inputs may change logits of tiny models, as a share of their root mean square. Most models have
#: 0.01 to 0.07; OLMoE has 0.11, as its router chooses other experts. One tensor with shifted rows gives up to 1.3.
MOST_DISTANCE = 0.15


def distance(logits: Tensor, expanded: Tensor) -> float:
    """Return the root mean square of the difference from the expanded model's logits, as a share of theirs."""
    return float((logits - expanded).square().mean().sqrt() / expanded.square().mean().sqrt())
