"""Tiny random models of each architecture, written by transformers, with which a wrong engine fails the parity tests.

With transformers' own initialization (std 0.02) a small model attends uniformly and its logits hardly differ, so that
parity would hold even without RoPE. Here matrices keep or raise the variance, norm weights and biases are far from
neutral, and sequences outgrow the sliding window and the original RoPE length. The parity tests check that the logits
spread.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

#: Special tokens: padding, begin and end of text. The vocabulary has them and a token for each byte.
SPECIAL = ("<pad>", "<s>", "</s>")
VOCAB = len(SPECIAL) + 256
#: Factor by which a matrix raises the standard deviation of its input.
GAIN = 1.4
LAYERS = 4
#: Length of the parity prompts, and the default `max_model_len`, on which RoPE depends.
LENGTH = 72
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.0, 7.0],
}

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """`model_type` and overrides of a transformers config."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = LENGTH


def _scaled(rope: dict[str, Any], **config: Any) -> Tiny:
    return Tiny(model_type="llama", config={"rope_parameters": {"rope_theta": 10000.0, **rope}, **config})


TINY: dict[str, Tiny] = {
    "llama": Tiny(model_type="llama"),
    "llama_biased_tied": Tiny(
        model_type="llama", config={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama_linear": _scaled({"rope_type": "linear", "factor": 3.0}),
    "llama_dynamic": _scaled({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=24),
    "llama_llama3": _scaled(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        }
    ),
    "llama_yarn": _scaled({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}),
    "mistral": Tiny(model_type="mistral", config={"sliding_window": 19, "head_dim": 24}),
    "qwen2": Tiny(
        model_type="qwen2",
        config={"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen3": Tiny(model_type="qwen3", config={"head_dim": 24}),
    "gemma2": Tiny(
        model_type="gemma2",
        config={
            "head_dim": 24,
            "sliding_window": 21,
            "query_pre_attn_scalar": 37,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 12.0,
        },
    ),
    "gemma3": Tiny(
        model_type="gemma3_text",
        config={
            "head_dim": 24,
            "sliding_window": 21,
            "query_pre_attn_scalar": 37,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi3": Tiny(model_type="phi3", config={"sliding_window": 19}),
    "phi3_longrope": Tiny(
        model_type="phi3",
        config={
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.375, **LONGROPE},
            "original_max_position_embeddings": 24,
        },
    ),
    "phi3_shortrope": Tiny(
        model_type="phi3",
        config={
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.375, **LONGROPE},
            "original_max_position_embeddings": 80,
        },
    ),
    "mixtral": Tiny(
        model_type="mixtral", config={"num_hidden_layers": 2, "num_local_experts": 5, "sliding_window": 19}
    ),
    "qwen2_moe": Tiny(
        model_type="qwen2_moe",
        config={
            "num_hidden_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe": Tiny(
        model_type="qwen3_moe",
        config={
            "num_hidden_layers": 3,
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": Tiny(model_type="olmoe", config={"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}),
    "opt": Tiny(model_type="opt", config={"ffn_dim": 96}),
    "opt_350m": Tiny(
        model_type="opt", config={"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 40}
    ),
    "gpt2": Tiny(
        model_type="gpt2",
        config={
            "n_embd": 64,
            "n_head": 4,
            "n_layer": LAYERS,
            "n_positions": 128,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
}
_SHARED_EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
#: Sizes of latents.
_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

#: Models that only transformers' implementation runs; those from granitemoe on have experts.
FAMILIES: dict[str, Tiny] = {
    "granite": Tiny(model_type="granite", config={"attention_multiplier": 0.3, "logits_scaling": 0.7}),
    "olmo3": Tiny(model_type="olmo3", config={"sliding_window": 19}),
    "smollm3": Tiny(model_type="smollm3", config={"tie_word_embeddings": False}),
    "glm4": Tiny(model_type="glm4", config={"head_dim": 16}),
    "cohere2": Tiny(
        model_type="cohere2", config={"sliding_window": 19, "logit_scale": 0.8, "tie_word_embeddings": False}
    ),
    "phi": Tiny(model_type="phi"),
    "gpt_neox": Tiny(model_type="gpt_neox"),
    "olmo2_longrope": Tiny(
        model_type="olmo2",
        config={
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.5 + 0.7 * i for i in range(8)],
                "original_max_position_embeddings": 24,
            },
        },
    ),
    "modernbert_decoder": Tiny(model_type="modernbert-decoder", config={"local_attention": 38}),
    "seed_oss": Tiny(model_type="seed_oss", config={"head_dim": 16, "attention_dropout": 0.3, "residual_dropout": 0.3}),
    "cohere": Tiny(model_type="cohere", config={"use_qk_norm": True, "logit_scale": 0.8}),
    "exaone4": Tiny(model_type="exaone4", config={"sliding_window": 19, "sliding_window_pattern": 2}),
    "granitemoe": Tiny(
        model_type="granitemoe", config={"num_local_experts": 8, "attention_multiplier": 0.3, "logits_scaling": 0.7}
    ),
    "phimoe": Tiny(
        model_type="phimoe",
        config={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "lm_head_bias": True},
    ),
    "minimax_m2": Tiny(
        model_type="minimax_m2",
        config={"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "hunyuan_v1_moe": Tiny(model_type="hunyuan_v1_moe", config={"num_experts": 8, "moe_topk": 2, "head_dim": 16}),
    "dots1": Tiny(model_type="dots1", config=_SHARED_EXPERTS | {"sliding_window": 19, "max_window_layers": 2}),
    "afmoe": Tiny(
        model_type="afmoe",
        config={
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "sliding_window": 19,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe": Tiny(model_type="glm4_moe", config=_SHARED_EXPERTS),
    "deepseek_v2": Tiny(
        model_type="deepseek_v2",
        config={
            **(_LATENTS | _DEEPSEEK),
            "q_lora_rank": None,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 24,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek_v3": Tiny(model_type="deepseek_v3", config=_LATENTS | _DEEPSEEK),
    "glm4_moe_lite": Tiny(model_type="glm4_moe_lite", config=_LATENTS | _DEEPSEEK),
    "minicpm3": Tiny(model_type="minicpm3", config=_LATENTS | {"scale_emb": 2, "dim_model_base": 32}),
}


def make_tiny(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write config.json, safetensors and tokenizer.json of a tiny model under `folder`; return the model's folder."""
    path = folder / name
    if not path.exists():
        tiny_model(name, seed=seed).save_pretrained(path)
        byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def tiny_config(name: str) -> PreTrainedConfig:
    tiny = TINY.get(name) or FAMILIES[name]
    unused = {"opt": {"num_key_value_heads", "intermediate_size"}, "gpt2": set(_BASE) - {"vocab_size"}}
    base = {key: value for key, value in _BASE.items() if key not in unused.get(tiny.model_type, set())}
    return AutoConfig.for_model(tiny.model_type, **{**base, **tiny.config})


def tiny_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager").eval().float()
    scramble(model, seed)
    return model


@torch.no_grad()
def scramble(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    transposed = model.config.model_type == "gpt2"
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            neutral = 0.0 if name.endswith("bias") or model.config.model_type.startswith("gemma") else 1.0
            weight.copy_(neutral + 0.3 * noise)
        elif "embed" in name or "wte" in name or "wpe" in name:
            weight.copy_(0.3 * noise)
        else:
            fan_in = weight.shape[0] if transposed and "lm_head" not in name else weight.shape[-1]
            weight.copy_(noise * (GAIN / math.sqrt(fan_in)))
