"""Phi-3 and Phi-4-mini: Llama with qkv and gate-up fused in the checkpoint."""

from octavo_engine.config import ModelConfig
from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like


class Phi3(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        return llama_like(
            config,
            fused=True,
            norm_eps=config.hf.get("rms_norm_eps", 1e-5),
            windows=(config.hf.get("sliding_window"),) * config.num_layers,
        )
