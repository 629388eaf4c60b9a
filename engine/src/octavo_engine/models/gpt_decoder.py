"""The decoder of GPT-2 and OPT: learned positions, layer norms with biases, a plain feed-forward."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from octavo_engine.config import ModelConfig
from octavo_engine.layers.attention import SelfAttention
from octavo_engine.layers.embedding import LearnedPositions
from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.mlp import PlainMLP
from octavo_engine.layers.norm import LayerNorm
from octavo_engine.models.model import Inputs, Model
from octavo_engine.ops.attention import AttentionSpec, ForwardContext, LayerKVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTDecoderSpec:
    """Names are relative to the layer's prefix. `norm_first` False: each norm follows its residual addition."""

    qkv: tuple[str, ...]
    out: str
    up: str
    down: str
    attention_norm: str
    mlp_norm: str
    inner_size: int
    activation: str
    scales: tuple[float, ...]  # attention scale per layer
    norm_first: bool = True
    norm_eps: float = 1e-5
    affine: bool = True
    bias: bool = True
    transposed: bool = False


class GPTDecoderLayer(Layer):
    def __init__(
        self, prefix: str, layer_idx: int, spec: GPTDecoderSpec, config: ModelConfig, build: BuildContext
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, spec.inner_size

        def linear(names: tuple[str, ...], in_features: int, *outs: int) -> Linear:
            full = tuple(f"{prefix}.{name}" for name in names)
            return Linear(
                LinearSpec(in_features=in_features, outs=outs, names=full, bias=spec.bias, transposed=spec.transposed),
                build,
            )

        def norm(name: str) -> LayerNorm:
            return LayerNorm(f"{prefix}.{name}", hidden, build, eps=spec.norm_eps, affine=spec.affine)

        attention = AttentionSpec(
            layer_idx=layer_idx,
            num_heads=config.num_heads,
            kv=LayerKVSpec(num_kv_heads=config.num_heads, head_dim=config.head_dim),
            scale=spec.scales[layer_idx],
        )
        qkv, out = linear(spec.qkv, hidden, hidden, hidden, hidden), linear((spec.out,), hidden, hidden)
        self.attention = SelfAttention(attention, qkv=qkv, out=out)
        self.mlp = PlainMLP(linear((spec.up,), hidden, inner), linear((spec.down,), inner, hidden), spec.activation)
        self.attention_norm, self.mlp_norm = norm(spec.attention_norm), norm(spec.mlp_norm)
        self.norm_first = spec.norm_first

    def __call__(self, x: Float[Tensor, "tokens hidden"], ctx: ForwardContext) -> Float[Tensor, "tokens hidden"]:
        if self.norm_first:
            x.add_(self.attention(self.attention_norm(x), None, ctx))
            return x.add_(self.mlp(self.mlp_norm(x)))
        x = self.attention_norm(x.add_(self.attention(x, None, ctx)))
        return self.mlp_norm(x.add_(self.mlp(x)))


class GPTDecoder(Model):
    """A subclass creates `embedding`, `positions`, `layers` and `head`, and overrides `before` and `after`."""

    positions: LearnedPositions
    layers: nn.ModuleList

    def forward(
        self, inputs: Inputs, positions: Int[Tensor, " tokens"], ctx: ForwardContext
    ) -> Float[Tensor, "tokens hidden"]:
        x = self.before(self.embed(inputs)).add_(self.positions(positions))
        for layer in self.layers:
            x = layer(x, ctx)
        return self.after(x)

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor) -> Tensor:
        return x
