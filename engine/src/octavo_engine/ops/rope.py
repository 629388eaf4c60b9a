"""Rotary position embedding, in place, on the queries and keys of a step together.

`sin` carries the sign of the rotation: [-sin, sin] over the two halves of the rotary dimensions, so that
x * cos + roll(x, half) * sin is the whole rotation, in three kernels. Which angles: `layers/rope.py`.
"""

from jaxtyping import Float
from torch import Tensor


def rotate_(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens one rotary_dim"],
    sin: Float[Tensor, "tokens one rotary_dim"],
) -> None:
    """Dimensions of a head beyond `rotary_dim` stay as they are."""
    rotary_dim = cos.shape[-1]
    turned = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    crossed = turned.roll(rotary_dim // 2, -1)
    turned.mul_(cos).addcmul_(crossed, sin)
