"""The two feed-forward blocks: gated (Llama and most later models) and plain (GPT-2, OPT)."""

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, Layer, inputs_of_cut
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.shard import Shard, split_inputs, split_outputs
from octavo_engine.ops.activation import ACTIVATIONS, Activation
from octavo_engine.ops.native_quantised import PANEL
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
    adds_up: bool = True,
) -> GatedMLP:
    """Build a gated block. `names` under `prefix`: gate, up and down, or gate with up, and down.

    `adds_up`: the block itself sums its output over the ranks, each of which has a part of `inner_size`.
    """
    wide, narrow = gated_specs(prefix, size, inner_size, names, build, bias=bias, adds_up=adds_up)
    return GatedMLP(Linear(wide, build), Linear(narrow, build), activation)


def gated_specs(
    prefix: str,
    size: int,
    inner_size: int,
    names: tuple[str, ...],
    build: BuildContext,
    *,
    bias: bool = False,
    adds_up: bool = True,
) -> tuple[LinearSpec, LinearSpec]:
    """Return the two layers of a gated block; see `gated_mlp`."""
    *gate_up, down = (f"{prefix}.{name}" for name in names)
    inner = inner_share(f"{down}.weight", inner_size, build)
    wide = LinearSpec(
        in_features=size,
        outs=(inner_size, inner_size),
        names=tuple(gate_up),
        bias=bias,
        gated=True,
        shard=split_outputs(build.group, inner, inner),
    )
    narrow = LinearSpec(
        in_features=inner_size,
        outs=(size,),
        names=(down,),
        bias=bias,
        shard=split_inputs(build.group, inner, adds_up=adds_up),
    )
    return wide, narrow


def inner_share(down: str, inner_size: int, build: BuildContext) -> range:
    """Return this rank's range of inner values, in whole blocks of the second layer's weight, or whole panels.

    Raises StartupError if there are fewer blocks than ranks.
    """
    block_format, ranks = build.divided_format(down, inner_size), build.group.size
    if block_format is None:
        return build.group.share(inner_size, PANEL if inner_size >= PANEL * ranks else 1)
    size = inputs_of_cut(block_format, inner_size)
    num_blocks = inner_size // size
    if num_blocks < ranks:
        raise StartupError(
            f"tensor '{down}': its {inner_size} inputs are {num_blocks} {block_format.name} blocks of "
            f"{size}, too few for --tensor-parallel-size {ranks}: use at most {num_blocks}, or "
            f"{build.format_remedy(down, inner_size)}."
        )
    return build.group.share(inner_size, size)


class PlainMLP(Layer):
    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.activation = activation_named(activation)

    def __call__(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self.down(self.activation(self.up(x)))


def plain_mlp(
    names: tuple[str, str],
    sizes: tuple[int, int],
    activation: str,
    build: BuildContext,
    *,
    bias: bool,
    transposed: bool,
) -> PlainMLP:
    """Build a plain block. `names`: up and down. `sizes`: hidden size and inner size."""
    (up, down), (size, inner_size), group = names, sizes, build.group
    inner = inner_share(f"{down}.weight", inner_size, build)

    def linear(name: str, in_features: int, out: int, shard: Shard) -> Linear:
        spec = LinearSpec(
            in_features=in_features, outs=(out,), names=(name,), bias=bias, transposed=transposed, shard=shard
        )
        return Linear(spec, build)

    wide = linear(up, size, inner_size, split_outputs(group, inner))
    return PlainMLP(wide, linear(down, inner_size, size, split_inputs(group, inner)), activation)
