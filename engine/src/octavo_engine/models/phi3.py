"""Phi-3 and Phi-4-mini: Llama with qkv and gate-up fused in the checkpoint."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers


class Phi3(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        numbers = ConfigNumbers.of(config)
        return llama_like(
            config,
            fused=True,
            norm_eps=numbers.real("rms_norm_eps", 1e-5),
            windows=(numbers.window(None),) * config.num_layers,
        )
