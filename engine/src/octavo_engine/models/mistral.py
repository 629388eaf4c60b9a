"""Mistral: Llama with a sliding window on every layer, unless `sliding_window` is null."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers


class Mistral(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        return llama_like(config, windows=(ConfigNumbers.of(config).window(4096),) * config.num_layers)
