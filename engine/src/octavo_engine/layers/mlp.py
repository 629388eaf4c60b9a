"""The two feed-forward blocks: gated (Llama and most later models) and plain (GPT-2, OPT)."""

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.ops.activation import ACTIVATIONS, Activation
from octavo_engine.wire.errors import StartupError


def activation_named(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise StartupError(f"activation '{name}' is not supported: supported are {', '.join(sorted(ACTIVATIONS))}.")
    return ACTIVATIONS[name]


class GatedMLP(Layer):
    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.activation = activation_named(activation)

    def __call__(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self.down(self.gate_up.gated(x, self.activation))


class PlainMLP(Layer):
    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.activation = activation_named(activation)

    def __call__(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self.down(self.activation(self.up(x)))
