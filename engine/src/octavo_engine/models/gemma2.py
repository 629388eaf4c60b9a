"""Gemma 2: norms before and after both blocks, with weights around zero; soft caps; windows on every other layer."""

from typing import Any

from octavo_engine.config import ModelConfig
from octavo_engine.models.decoder import Decoder, DecoderSpec, layer_types, llama_like, windows


def gemma_like(config: ModelConfig, types: tuple[str, ...], **differences: Any) -> DecoderSpec:
    hf = config.hf
    bias = hf.get("attention_bias", False)
    shared: dict[str, Any] = {
        "windows": windows(types, hf.get("sliding_window", 4096)),
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_offset": 1.0,
        "update_norms": True,
        "activation": hf.get("hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": config.hidden_size**0.5,
        "tied": hf.get("tie_word_embeddings", True),
    }
    return llama_like(config, **(shared | differences))


class Gemma2(Decoder):
    @staticmethod
    def spec_of(config: ModelConfig) -> DecoderSpec:
        return gemma_like(
            config,
            layer_types(config, lambda idx: idx % 2 == 0),
            attention_softcap=config.hf.get("attn_logit_softcapping", 50.0),
            final_softcap=config.hf.get("final_logit_softcapping", 30.0),
        )
