"""GPT-2: fused qkv, weights stored as [in, out]."""

from torch import Tensor, nn

from octavo_engine.layers.embedding import Embedding, LearnedPositions
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.norm import LayerNorm
from octavo_engine.models.gpt_decoder import GPTDecoder, GPTDecoderLayer, GPTDecoderSpec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers


def _spec(config: ModelConfig) -> GPTDecoderSpec:
    hf, numbers = config.hf, ConfigNumbers.of(config)
    scale = config.head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    by_layer = hf.get("scale_attn_by_inverse_layer_idx", False)
    return GPTDecoderSpec(
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        inner_size=numbers.optional(("n_inner",), 4 * config.hidden_size),
        activation=hf.get("activation_function", "gelu_new"),
        scales=tuple(scale / (idx + 1) if by_layer else scale for idx in range(config.num_layers)),
        norm_eps=numbers.real("layer_norm_epsilon", 1e-5),
        transposed=True,
    )


class GPT2(GPTDecoder):
    base_prefix = "transformer."
    ignored = ("attn.bias", "attn.masked_bias")

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        spec, hidden = _spec(config), config.hidden_size
        stages = build.stages
        if stages.is_first:
            self.embedding = Embedding("transformer.wte", config.vocab_size, hidden, build)
            self.positions = LearnedPositions("transformer.wpe", config.max_position_embeddings, hidden, build)
        self.layers = nn.ModuleList(
            GPTDecoderLayer(f"transformer.h.{idx}", idx, spec, config, build) for idx in stages.share(config.num_layers)
        )
        if stages.is_last:
            self.norm = LayerNorm("transformer.ln_f", hidden, build, eps=spec.norm_eps)
        if stages.is_first:
            self.head = self.make_head("lm_head", self.embedding, tied=config.hf.get("tie_word_embeddings", True))

    def after(self, x: Tensor) -> Tensor:
        return self.norm(x)
