"""OPT: positions start at row 2; the 350M model normalises after each residual addition and has narrower embeddings."""

from torch import Tensor, nn

from octavo_engine.layers.embedding import Embedding, LearnedPositions
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.norm import LayerNorm
from octavo_engine.models.gpt_decoder import GPTDecoder, GPTDecoderLayer, GPTDecoderSpec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers

POSITION_OFFSET = 2


def _spec(config: ModelConfig) -> GPTDecoderSpec:
    hf = config.hf
    return GPTDecoderSpec(
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        up="fc1",
        down="fc2",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        inner_size=ConfigNumbers.of(config).optional(("ffn_dim",), 3072),
        activation=hf.get("activation_function", "relu"),
        scales=(config.head_dim**-0.5,) * config.num_layers,
        norm_first=hf.get("do_layer_norm_before", True),
        affine=hf.get("layer_norm_elementwise_affine", True),
        bias=hf.get("enable_bias", True),
    )


def _projection(size: int, out: int, name: str, build: BuildContext) -> Linear:
    return Linear(LinearSpec(in_features=size, outs=(out,), names=(name,)), build)


class OPT(GPTDecoder):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf, spec, hidden = config.hf, _spec(config), config.hidden_size
        narrow = ConfigNumbers.of(config).optional(("word_embed_proj_dim",), hidden)
        prefix, stages = "model.decoder", build.stages
        self.widen: Linear | None = None
        if stages.is_first:
            self.embedding = Embedding(f"{prefix}.embed_tokens", config.vocab_size, narrow, build)
            self.positions = LearnedPositions(
                f"{prefix}.embed_positions", config.max_position_embeddings, hidden, build, offset=POSITION_OFFSET
            )
            if narrow != hidden:
                self.widen = _projection(narrow, hidden, f"{prefix}.project_in", build)
        self.layers = nn.ModuleList(
            GPTDecoderLayer(f"{prefix}.layers.{idx}", idx, spec, config, build)
            for idx in stages.share(config.num_layers)
        )
        self.norm: LayerNorm | None = None
        if stages.is_last and spec.norm_first and not hf.get("_remove_final_layer_norm", False):
            self.norm = LayerNorm(f"{prefix}.final_layer_norm", hidden, build, affine=spec.affine)
        self.narrow: Linear | None = None
        if stages.is_last and narrow != hidden:
            self.narrow = _projection(hidden, narrow, f"{prefix}.project_out", build)
        if stages.is_first:
            self.head = self.make_head("lm_head", self.embedding, tied=hf.get("tie_word_embeddings", True))

    def before(self, x: Tensor) -> Tensor:
        return x if self.widen is None else self.widen(x)

    def after(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return x if self.narrow is None else self.narrow(x)
