"""Mistral: Llama with a sliding window on every layer, unless `sliding_window` is null."""

from octavo_engine.config import ModelConfig
from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like


class Mistral(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        return llama_like(config, windows=(config.hf.get("sliding_window", 4096),) * config.num_layers)
