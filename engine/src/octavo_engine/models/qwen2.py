"""Qwen 2 and 2.5: Llama with biases on q, k, v; later layers have a window if `use_sliding_window` is set."""

from octavo_engine.models.decoder import Decoder, DecoderSpec, layer_types, llama_like, windows
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers


def qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    hf = config.hf
    numbers = ConfigNumbers.of(config)
    window = numbers.window(4096) if hf.get("use_sliding_window", False) else None
    first = numbers.optional(("max_window_layers",), 28, lowest=0)
    types = layer_types(config, lambda idx: window is not None and idx >= first)
    return windows(types, window)


class Qwen2(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        return llama_like(config, qkv_bias=True, windows=qwen_windows(config))
