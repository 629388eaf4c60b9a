"""Gemma 2: norms before and after both blocks, with weights around zero; soft caps; windows on every other layer."""

from typing import Any

from octavo_engine.models.decoder import Decoder, DecoderSpec, layer_types, llama_like, windows
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers


def gemma_like(config: ModelConfig, types: tuple[str, ...], **differences: Any) -> DecoderSpec:
    hf, numbers = config.hf, ConfigNumbers.of(config)
    bias = hf.get("attention_bias", False)
    shared: dict[str, Any] = {
        "windows": windows(types, numbers.window(4096)),
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_offset": 1.0,
        "update_norms": True,
        "activation": hf.get("hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": numbers.real("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": config.hidden_size**0.5,
        "tied": hf.get("tie_word_embeddings", True),
    }
    return llama_like(config, **(shared | differences))


class Gemma2(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        numbers = ConfigNumbers.of(config)
        return gemma_like(
            config,
            layer_types(config, lambda idx: idx % 2 == 0),
            attention_softcap=numbers.nullable_real("attn_logit_softcapping", 50.0),
            final_softcap=numbers.nullable_real("final_logit_softcapping", 30.0),
        )
