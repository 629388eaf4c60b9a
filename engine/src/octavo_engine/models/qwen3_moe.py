"""Qwen3-MoE: Qwen 3 with experts; `use_sliding_window` sets a window on every layer."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.models.expert_config import moe_spec, qwen_experts
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers


class Qwen3MoE(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        hf, bias = config.hf, config.hf.get("attention_bias", False)
        window = ConfigNumbers.of(config).window(4096) if hf.get("use_sliding_window", False) else None
        experts = moe_spec(
            config,
            num_experts=128,
            top_k=8,
            inner=("moe_intermediate_size", 768),
            normalised=hf.get("norm_topk_prob", False),
        )
        return llama_like(
            config,
            qkv_bias=bias,
            out_bias=bias,
            head_norm=True,
            windows=(window,) * config.num_layers,
            experts=qwen_experts(config, experts),
        )
