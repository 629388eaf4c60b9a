"""Qwen2-MoE, Qwen1.5-MoE: Qwen 2 with experts, one of which computes every row; windows on alternate layers."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, layer_types, llama_like, windows
from octavo_engine.models.expert_config import moe_spec, qwen_experts
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers


class Qwen2MoE(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        hf, numbers = config.hf, ConfigNumbers.of(config)
        window = numbers.window(4096) if hf.get("use_sliding_window", False) else None
        last = numbers.optional(("max_window_layers",), 28, lowest=0)
        types = layer_types(config, lambda idx: window is not None and idx % 2 == 0 and idx < last)
        experts = moe_spec(
            config,
            num_experts=60,
            top_k=4,
            inner=("moe_intermediate_size", 1408),
            normalised=hf.get("norm_topk_prob", False),
            shared=("shared_expert_intermediate_size", 5632),
        )
        return llama_like(
            config,
            qkv_bias=hf.get("qkv_bias", True),
            windows=windows(types, window),
            experts=qwen_experts(config, experts),
        )
