"""Rotary position embedding, in place, on the queries and keys of a step together.

`sin` includes the sign of the rotation: [-sin, sin] over the two halves of the rotary dimensions, so that
x * cos + roll(x, half) * sin is the whole rotation. `layers/rope.py` computes the angles.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.native_library import kernels_for


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines for the tokens of one step, in the form that `rotate_` takes: the sine is signed."""

    cos: Float[Tensor, "tokens one rotary_dim"]
    sin: Float[Tensor, "tokens one rotary_dim"]


def rotate_(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens one rotary_dim"],
    sin: Float[Tensor, "tokens one rotary_dim"],
) -> None:
    """Rotate `x` in place, except dimensions of a head beyond `rotary_dim`. cos and sin must have equal strides."""
    library = kernels_for(x)
    if library is None or x.stride(2) != 1 or x.stride(1) != x.shape[2] or cos.stride(2) != 1 or cos.dtype != x.dtype:
        return rotate_reference_(x, cos, sin)
    assert cos.stride() == sin.stride()
    tokens, heads, head_dim = x.shape
    library.octavo_rotate(
        x.data_ptr(),
        x.stride(0),
        tokens,
        heads,
        head_dim,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.stride(0),
        cos.shape[2],
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return None


def rotate_reference_(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens one rotary_dim"],
    sin: Float[Tensor, "tokens one rotary_dim"],
) -> None:
    """Rotate `x` in place with three torch operations."""
    rotary_dim = cos.shape[-1]
    turned = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    crossed = turned.roll(rotary_dim // 2, -1)
    turned.mul_(cos).addcmul_(crossed, sin)
