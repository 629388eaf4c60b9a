"""Activations, plain and gated. The gated form takes gate and up side by side, as one fused linear returns them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.native_library import kernels_for
from octavo_engine.ops.triton_devices import runs_triton

_SILU, _GELU_TANH = range(2)  # as `enum Activation` of native/activation_functions.h


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function. `native`: its number in the kernels, None if only torch has it."""

    function: Callable[[Tensor], Tensor]
    native: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


_silu = Activation(F.silu, _SILU)
_gelu_tanh = Activation(partial(F.gelu, approximate="tanh"), _GELU_TANH)

#: Activations by their names in `config.json`. transformers' "gelu_new" and "gelu_fast" are the tanh form written out.
ACTIVATIONS: dict[str, Activation] = {
    "silu": _silu,
    "swish": _silu,
    "relu": Activation(F.relu),
    "gelu": Activation(F.gelu),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def act_mul(gate_up: Float[Tensor, "rows two_n"], activation: Activation) -> Float[Tensor, "rows n"]:
    if activation.native is not None and runs_triton(gate_up) and gate_up.stride(1) == 1:
        from octavo_engine.ops.triton import elementwise  # Triton is missing on most machines without a GPU

        return elementwise.gate(gate_up, activation.native)
    library = None if activation.native is None else kernels_for(gate_up)
    if library is None or gate_up.stride(1) != 1:
        return act_mul_reference(gate_up, activation)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    library.octavo_gate(
        gate_up.data_ptr(),
        gate_up.stride(0),
        rows,
        size,
        out.data_ptr(),
        activation.native,
        gate_up.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def act_mul_reference(gate_up: Float[Tensor, "rows two_n"], activation: Activation) -> Float[Tensor, "rows n"]:
    gate, up = gate_up.chunk(2, -1)
    return activation(gate).mul_(up)
