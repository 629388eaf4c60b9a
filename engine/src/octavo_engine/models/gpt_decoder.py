"""The decoder of GPT-2 and OPT: learned positions, layer norms with biases, a plain feed-forward."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from octavo_engine.layers.attention import SelfAttention
from octavo_engine.layers.attention_heads import rank_heads
from octavo_engine.layers.embedding import LearnedPositions
from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.mlp import plain_mlp
from octavo_engine.layers.norm import LayerNorm
from octavo_engine.layers.shard import Shard
from octavo_engine.models.model import Inputs, Model
from octavo_engine.ops.attention import AttentionSpec, ForwardContext, LayerKVSpec
from octavo_engine.settings.records import ModelConfig


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
        hidden, num_heads, dim = config.hidden_size, config.num_heads, config.head_dim
        heads = rank_heads(f"{prefix}.{spec.out}.weight", num_heads, num_heads, dim, build)

        def linear(names: tuple[str, ...], *outs: int, shard: Shard) -> Linear:
            full = tuple(f"{prefix}.{name}" for name in names)
            described = LinearSpec(
                in_features=hidden, outs=outs, names=full, bias=spec.bias, transposed=spec.transposed, shard=shard
            )
            return Linear(described, build)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(f"{prefix}.{name}", hidden, build, eps=spec.norm_eps, affine=spec.affine)

        attention = AttentionSpec(
            layer_idx=layer_idx - build.stages.share(config.num_layers).start,
            num_heads=len(heads.queries),
            kv=LayerKVSpec(num_kv_heads=len(heads.keys), head_dim=dim),
            scale=spec.scales[layer_idx],
        )
        self.attention = SelfAttention(
            attention,
            qkv=linear(spec.qkv, hidden, hidden, hidden, shard=heads.split_qkv(build.group)),
            out=linear((spec.out,), hidden, shard=heads.split_out(build.group)),
        )
        self.mlp = plain_mlp(
            (f"{prefix}.{spec.up}", f"{prefix}.{spec.down}"),
            (hidden, spec.inner_size),
            spec.activation,
            build,
            bias=spec.bias,
            transposed=spec.transposed,
        )
        self.attention_norm, self.mlp_norm = norm(spec.attention_norm), norm(spec.mlp_norm)
        self.norm_first = spec.norm_first

    def __call__(self, x: Float[Tensor, "tokens hidden"], ctx: ForwardContext) -> Float[Tensor, "tokens hidden"]:
        if self.norm_first:
            x.add_(self.attention(self.attention_norm(x), None, ctx))
            return x.add_(self.mlp(self.mlp_norm(x)))
        x = self.attention_norm(x.add_(self.attention(x, None, ctx)))
        return self.mlp_norm(x.add_(self.mlp(x)))


class GPTDecoder(Model):
    """A subclass creates `layers`; on the first stage also `embedding`, `positions` and `head`; on the last stage also
    the modules that `after` uses."""

    positions: LearnedPositions
    layers: nn.ModuleList

    def forward(
        self, inputs: Inputs, positions: Int[Tensor, " tokens"], ctx: ForwardContext
    ) -> Float[Tensor, "tokens hidden"]:
        stages = self.build.stages
        if stages.is_first:
            x = self.before(self.embed(inputs)).add_(self.positions(positions))
        else:
            (x,) = stages.receive(*self.stage_rows(positions, 1))
        for layer in self.layers:
            x = layer(x, ctx)
        if stages.is_last:
            return self.after(x)
        stages.send(x)
        return x if not stages.is_first else x.new_empty(len(x), self.embedding.shape[1])  # OPT may have narrower rows

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor) -> Tensor:
        return x
