"""Phi-3 and Phi-4-mini: Llama with qkv and gate-up fused in the checkpoint, and longrope under several names."""

from dataclasses import replace

from octavo_engine.config import ModelConfig
from octavo_engine.layers.rope_frequencies import rope_spec
from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.sources.model_config import rope_parameters


class Phi3(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        rope = rope_spec(config, rope_parameters(config.hf))
        if rope.kind in ("su", "yarn"):
            rope = replace(rope, kind="longrope")
        return llama_like(
            config,
            ropes=(rope,),
            fused=True,
            norm_eps=config.hf.get("rms_norm_eps", 1e-5),
            windows=(config.hf.get("sliding_window"),) * config.num_layers,
        )
