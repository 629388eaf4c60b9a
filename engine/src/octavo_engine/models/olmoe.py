"""OLMoE: Llama with experts on every layer, and a norm of the whole query and key projections."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.models.expert_config import moe_spec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers
from octavo_engine.wire.errors import StartupError


class OLMoE(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        hf, bias = config.hf, config.hf.get("attention_bias", False)
        if hf.get("clip_qkv") is not None:
            raise StartupError(
                f"{config.name}: clip_qkv in config.json is {hf['clip_qkv']}: limits of queries, keys and values are "
                "not supported yet, only null."
            )
        experts = moe_spec(
            config,
            num_experts=64,
            top_k=8,
            inner=("intermediate_size", 2048),
            normalised=hf.get("norm_topk_prob", False),
        )
        return llama_like(
            config,
            qkv_bias=bias,
            out_bias=bias,
            projection_norm=True,
            norm_eps=ConfigNumbers.of(config).real("rms_norm_eps", 1e-5),
            experts=(experts,) * config.num_layers,
        )
