"""The two feed-forward blocks: gated (Llama and most later models) and plain (GPT-2, OPT)."""

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
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


def gated_mlp(
    prefix: str,
    size: int,
    inner_size: int,
    names: tuple[str, ...],
    activation: str,
    build: BuildContext,
    *,
    bias: bool = False,
) -> GatedMLP:
    """Build a gated block. `names` under `prefix`: gate, up and down, or gate with up, and down."""
    *gate_up, down = (f"{prefix}.{name}" for name in names)
    wide = LinearSpec(in_features=size, outs=(inner_size, inner_size), names=tuple(gate_up), bias=bias, gated=True)
    narrow = LinearSpec(in_features=inner_size, outs=(size,), names=(down,), bias=bias)
    return GatedMLP(Linear(wide, build), Linear(narrow, build), activation)


class PlainMLP(Layer):
    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.activation = activation_named(activation)

    def __call__(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self.down(self.activation(self.up(x)))
