"""Activations, alone and gated. The gated form takes gate and up side by side, as one fused linear gives them."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]

_gelu_tanh: Activation = partial(F.gelu, approximate="tanh")

#: By the names of `config.json`. transformers' "gelu_new" and "gelu_fast" are the tanh form written out.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def act_mul(gate_up: Float[Tensor, "rows two_n"], activation: Activation) -> Float[Tensor, "rows n"]:
    gate, up = gate_up.chunk(2, -1)
    return activation(gate).mul_(up)
