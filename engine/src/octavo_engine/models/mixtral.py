"""Mixtral: Llama with experts on every layer, and Mistral's window where `sliding_window` is set."""

from octavo_engine.layers.rope import rope_spec
from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.models.expert_config import moe_spec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers, rope_parameters


class Mixtral(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        hf, numbers = config.hf, ConfigNumbers.of(config)
        experts = moe_spec(
            config,
            num_experts=8,
            top_k=2,
            inner=("intermediate_size", 14336),
            normalised=True,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        )
        return llama_like(
            config,
            ropes=(rope_spec(config, rope_parameters({"rope_theta": 1e6, **hf})),),
            norm_eps=numbers.real("rms_norm_eps", 1e-5),
            windows=(numbers.window(None),) * config.num_layers,
            experts=(experts,) * config.num_layers,
        )
