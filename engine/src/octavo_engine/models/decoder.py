"""The decoder shared by most models since Llama: pre-norm, RMS norm, rotary positions, gated feed-forward.

`DecoderSpec` lists the differences from Llama; each architecture's file makes a spec from its `config.json`.
The residual stream is one tensor that is changed in place: a layer receives it with an update that is not added yet, so
that the addition is fused into the next norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octavo_engine.layers.attention import SelfAttention
from octavo_engine.layers.attention_heads import rank_heads
from octavo_engine.layers.embedding import Embedding
from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.mlp import GatedMLP, gated_mlp
from octavo_engine.layers.moe import MoE, MoESpec
from octavo_engine.layers.norm import HeadNorm, ProjectionNorm, RMSNorm
from octavo_engine.layers.rope import RopeSpec, RotaryEmbedding, rope_spec
from octavo_engine.models.model import Inputs, Model, Positions
from octavo_engine.ops.attention import AttentionSpec, ForwardContext, LayerKVSpec
from octavo_engine.ops.rope import Rotation
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers, rope_parameters
from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """`windows`, `experts` and `rope_idx` are empty or have one entry per layer; `rope_idx` indexes `ropes`.

    A layer whose entry in `experts` is None has a dense feed-forward block.
    """

    ropes: tuple[RopeSpec, ...]
    rope_idx: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    experts: tuple[MoESpec | None, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False  # the checkpoint has qkv_proj and gate_up_proj (Phi-3)
    head_norm: bool = False
    projection_norm: bool = False
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    update_norms: bool = False  # attention and feed-forward outputs are normed before they are added (Gemma)
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    tied: bool = False


class DecoderLayer(Layer):
    def __init__(self, layer_idx: int, spec: DecoderSpec, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        prefix = f"model.layers.{layer_idx}"
        before_mlp = "pre_feedforward_layernorm" if spec.update_norms else "post_attention_layernorm"
        self.attention = _attention(f"{prefix}.self_attn", layer_idx, spec, config, build)
        self.mlp = _mlp(prefix, layer_idx, spec, config, build)
        self.attention_norm = _norm(f"{prefix}.input_layernorm", spec, config, build)
        self.mlp_norm = _norm(f"{prefix}.{before_mlp}", spec, config, build)
        self.attention_update_norm: RMSNorm | None = None
        self.mlp_update_norm: RMSNorm | None = None
        if spec.update_norms:
            self.attention_update_norm = _norm(f"{prefix}.post_attention_layernorm", spec, config, build)
            self.mlp_update_norm = _norm(f"{prefix}.post_feedforward_layernorm", spec, config, build)

    def __call__(
        self, residual: Tensor, update: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> Float[Tensor, "tokens hidden"]:
        """Add the previous layer's `update` to `residual` in place; return this layer's update, which is not added."""
        update = self.attention(self.attention_norm(residual, update), rotation, ctx)
        if self.attention_update_norm is not None:
            update = self.attention_update_norm(update)
        update = self.mlp(self.mlp_norm(residual, update))
        return update if self.mlp_update_norm is None else self.mlp_update_norm(update)


class Decoder(Model):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        raise NotImplementedError

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        spec = self.spec_of(config)
        stages, own = build.stages, build.stages.share(config.num_layers)
        if stages.is_first:
            self.embedding = Embedding(
                "model.embed_tokens", config.vocab_size, config.hidden_size, build, scale=spec.embedding_scale
            )
        self.rope_idx = [spec.rope_idx[idx] if spec.rope_idx else 0 for idx in own]
        self.ropes = nn.ModuleList(RotaryEmbedding(rope, build) for rope in spec.ropes)
        self.layers = nn.ModuleList(DecoderLayer(idx, spec, config, build) for idx in own)
        if stages.is_last:
            self.norm = _norm("model.norm", spec, config, build)
        if stages.is_first:
            self.head = self.make_head("lm_head", self.embedding, tied=spec.tied, softcap=spec.final_softcap)

    def forward(self, inputs: Inputs, positions: Positions, ctx: ForwardContext) -> Float[Tensor, "tokens hidden"]:
        stages = self.build.stages
        residual, update = (
            (self.embed(inputs), None) if stages.is_first else stages.receive(*self.stage_rows(positions, 2))
        )
        deep: Sequence[Tensor] = ()
        if residual.shape[1] > self.config.hidden_size:
            residual, *deep = [part.contiguous() for part in torch.split(residual, self.config.hidden_size, 1)]
        rotations = [rope(positions) for rope in self.ropes]
        for rope_idx, layer, rows in zip_longest(self.rope_idx, self.layers, deep):
            update = layer(residual, update, rotations[rope_idx], ctx)
            update = update if rows is None else update + rows
        if not stages.is_last:  # adding here would round differently than the addition in the next norm
            assert update is not None, "a stage has a layer"
            stages.send(residual, update)
            return residual
        normed: Tensor = self.norm(residual, update)
        return normed


def llama_like(config: ModelConfig, *, ropes: tuple[RopeSpec, ...] | None = None, **differences: Any) -> DecoderSpec:
    """Build a spec from the keys that nearly every `config.json` has; `differences` are fields that override it."""
    hf = config.hf
    shared: dict[str, Any] = {
        "ropes": ropes or (rope_spec(config, rope_parameters(hf)),),
        "norm_eps": ConfigNumbers.of(config).real("rms_norm_eps", 1e-6),
        "activation": hf.get("hidden_act", "silu"),
        "tied": hf.get("tie_word_embeddings", False),
    }
    return DecoderSpec(**(shared | differences))


def layer_types(config: ModelConfig, is_sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """List "sliding_attention" or "full_attention" per layer, from the config or else by `is_sliding`."""
    listed = config.hf.get("layer_types")
    if listed:
        kinds = ("sliding_attention", "full_attention")
        if (
            not isinstance(listed, list)
            or len(listed) != config.num_layers
            or any(kind not in kinds for kind in listed)
        ):
            raise StartupError(
                f"{config.name}: layer_types in config.json must list {' or '.join(kinds)} for each of the "
                f"{config.num_layers} layers, got {listed!r:.60}: correct the file."
            )
        return tuple(listed)
    return tuple("sliding_attention" if is_sliding(idx) else "full_attention" for idx in range(config.num_layers))


def windows(types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _norm(name: str, spec: DecoderSpec, config: ModelConfig, build: BuildContext) -> RMSNorm:
    return RMSNorm(name, config.hidden_size, build, eps=spec.norm_eps, offset=spec.norm_offset)


def _attention(
    prefix: str, layer_idx: int, spec: DecoderSpec, config: ModelConfig, build: BuildContext
) -> SelfAttention:
    num_heads, num_kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    names = ("qkv_proj",) if spec.fused else ("q_proj", "k_proj", "v_proj")
    heads = rank_heads(f"{prefix}.o_proj.weight", num_heads, num_kv_heads, dim, build)
    qkv = LinearSpec(
        in_features=config.hidden_size,
        outs=(num_heads * dim, num_kv_heads * dim, num_kv_heads * dim),
        names=tuple(f"{prefix}.{name}" for name in names),
        bias=spec.qkv_bias,
        shard=heads.split_qkv(build.group),
    )
    out = LinearSpec(
        in_features=num_heads * dim,
        outs=(config.hidden_size,),
        names=(f"{prefix}.o_proj",),
        bias=spec.out_bias,
        shard=heads.split_out(build.group),
    )
    window = spec.windows[layer_idx] if spec.windows else None
    attention = AttentionSpec(
        layer_idx=layer_idx - build.stages.share(config.num_layers).start,
        num_heads=len(heads.queries),
        kv=LayerKVSpec(num_kv_heads=len(heads.keys), head_dim=dim, window=window),
        scale=dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
        softcap=spec.attention_softcap,
    )
    norms: dict[str, Any] = {}
    if spec.projection_norm:
        norms["projection_norm"] = ProjectionNorm(prefix, (num_heads, num_kv_heads), heads, build, eps=spec.norm_eps)
    if spec.head_norm:
        norms["head_norm"] = HeadNorm(prefix, heads, build, eps=spec.norm_eps, offset=spec.norm_offset)
    return SelfAttention(attention, qkv=Linear(qkv, build), out=Linear(out, build), **norms)


def _mlp(prefix: str, layer_idx: int, spec: DecoderSpec, config: ModelConfig, build: BuildContext) -> GatedMLP | MoE:
    experts = spec.experts[layer_idx] if spec.experts else None
    if experts is not None:
        return MoE(prefix, config.hidden_size, experts, spec.activation, build)
    names = ("gate_up_proj", "down_proj") if spec.fused else ("gate_proj", "up_proj", "down_proj")
    inner = ConfigNumbers.of(config).required(("intermediate_size",))
    return gated_mlp(f"{prefix}.mlp", config.hidden_size, inner, names, spec.activation, build, bias=spec.mlp_bias)
