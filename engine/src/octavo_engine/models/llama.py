"""Llama 2 and 3, and models of the same architecture: SmolLM2, TinyLlama, Yi."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.settings.records import ModelConfig


class Llama(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        bias = config.hf.get("attention_bias", False)
        return llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.hf.get("mlp_bias", False))
