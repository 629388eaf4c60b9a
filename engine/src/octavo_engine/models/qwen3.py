"""Qwen 3: Qwen 2 with a norm on each head's query and key instead of biases."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, llama_like
from octavo_engine.models.qwen2 import qwen_windows
from octavo_engine.settings.records import ModelConfig


class Qwen3(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        bias = config.hf.get("attention_bias", False)
        return llama_like(config, qkv_bias=bias, out_bias=bias, head_norm=True, windows=qwen_windows(config))
