"""Tiny transformers models written as GGUF like llama.cpp's converter does, to test that the engine undoes each change.

Names come from the `gguf` library's map, and the conversions follow llama.cpp's documentation: no code is shared with
the code under test.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_MOE = {**_COMMON, "num_experts": 6, "num_experts_per_tok": 2}
_GEMMA = {**_COMMON, "head_dim": 32, "num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 32}

#: The architecture's name in GGUF, perhaps with a comment -> (transformers' model type, config)
TINY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_COMMON, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE, "attention_bias": True}),
    "llama with experts": ("mixtral", {**_COMMON, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {**_MOE, "eos_token_id": 1}),
    "qwen2moe": ("qwen2_moe", {**_MOE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3moe": ("qwen3_moe", {**_MOE, "head_dim": 32, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "qwen2": ("qwen2", {**_COMMON, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 32}),
    "gemma2": ("gemma2", {**_GEMMA, "final_logit_softcapping": 20.0, "attn_logit_softcapping": 40.0}),
    "gemma3": ("gemma3_text", _GEMMA),
    "phi3": ("phi3", {**_COMMON, "pad_token_id": 0, "sliding_window": 24}),
    "gpt2": ("gpt2", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
}


def tiny_model(architecture: str, **changes: Any) -> Any:
    """Return a model with random weights, also for the norms and biases that transformers sets to constants.

    `changes`: values that replace those of the config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, config = TINY_CONFIGS[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def write_tiny_gguf(
    path: Path,
    architecture: str,
    model: Any,
    *,
    qtype: str = "F32",
    others: Mapping[str, str] | None = None,
    extra: dict[str, Tensor] | None = None,
    max_tensors: int = 0,
    chat_templates: list[dict[str, str]] | None = None,
) -> None:
    """Quantise matrices whose rows fit the blocks of `qtype`, and write other tensors as F32.

    `others`: types of the tensors with a part of a GGUF name. K types, which `gguf` cannot write, get random blocks.
    `extra` tensors are written unchanged; `max_tensors` splits the file into shards.
    """
    add_values, architecture = _EXTRA.get(architecture, _write_llama_like), architecture.split()[0]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    _write_metadata(writer, model.config)
    add_values(writer, model.config)
    if chat_templates:
        writer.add_chat_template(chat_templates)
    names = gguf.get_tensor_name_map(_arch_enum(architecture), model.config.num_hidden_layers)
    for name, tensor in _written_tensors(architecture, model).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        kind = next((kind for part, kind in (others or {}).items() if part in gguf_name), qtype)
        _add_tensor(writer, gguf_name, _converted(architecture, name, tensor, model.config).numpy(), kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    if model.config.model_type == "llama":
        writer.add_tensor("rope_freqs.weight", llama3_factors(model.config.rope_parameters, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arch_enum(architecture: str) -> Any:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)


def _written_tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(".attn.bias")}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for prefix in [name.removesuffix("gate_up_proj") for name in state if name.endswith("experts.gate_up_proj")]:
        gate, up = state.pop(f"{prefix}gate_up_proj").chunk(2, 1)
        state |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        state[f"{prefix}down_proj.weight"] = state.pop(f"{prefix}down_proj")
    return state


def _converted(architecture: str, name: str, tensor: Tensor, config: Any) -> Tensor:
    if architecture == "llama" and ".q_proj." in name:
        return _interleave(tensor, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        return _interleave(tensor, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.t().contiguous()
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]
    return tensor


def _interleave(tensor: Tensor, heads: int) -> Tensor:
    """Make rows i and i + half of each head neighbours."""
    per_head = tensor.view(heads, -1, *tensor.shape[1:])
    half = per_head.shape[1] // 2
    order = [row for i in range(half) for row in (i, i + half)]
    return per_head[:, order].reshape(tensor.shape).contiguous()


def _add_tensor(writer: Any, name: str, array: "np.ndarray[Any, Any]", qtype: str) -> None:
    kind = GGMLQuantizationType[qtype]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if qtype == "F32" or array.ndim < 2 or array.shape[-1] % block:
        writer.add_tensor(name, array.astype(np.float32))
    elif qtype == "F16":
        writer.add_tensor(name, array.astype(np.float16))
    elif qtype in K_NUMBERS:
        writer.add_tensor(name, random_k_blocks(qtype, array.shape), raw_dtype=kind)
    else:
        writer.add_tensor(name, quantize(array.astype(np.float32), kind), raw_dtype=kind)


#: The bytes of a block of 256 values, and where its fp16 numbers are.
K_NUMBERS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


def random_k_blocks(qtype: str, shape: tuple[int, ...]) -> "np.ndarray[Any, Any]":
    """Return rows of random blocks, whose values are below 1."""
    num_bytes, places = K_NUMBERS[qtype]
    generator = np.random.default_rng(sum(shape))
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // 256, num_bytes), dtype=np.uint8)
    for at in places:
        numbers = generator.uniform(-2e-4, 2e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def llama3_factors(rope: dict[str, Any], half: int) -> Tensor:
    """Return the divisor of each frequency: 1 for short waves, `factor` for long ones, a blend between them."""
    frequencies = rope["rope_theta"] ** -(torch.arange(half) / half)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _write_metadata(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_token_list(["<s>", "</s>", "<|im_end|>", *(f"t{i}" for i in range(config.vocab_size - 3))])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _write_gpt2(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _write_llama_like(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])


def _write_experts(writer: Any, config: Any) -> None:
    _write_llama_like(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    for key, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if hasattr(config, key):
            add(getattr(config, key))


def _write_gemma(writer: Any, config: Any) -> None:
    _write_llama_like(writer, config)
    writer.add_sliding_window(config.sliding_window)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)


def _write_phi3(writer: Any, config: Any) -> None:
    _write_llama_like(writer, config)
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


_EXTRA: dict[str, Callable[[Any, Any], None]] = {
    "gpt2": _write_gpt2,
    "gemma2": _write_gemma,
    "gemma3": _write_gemma,
    "phi3": _write_phi3,
    "llama with experts": _write_experts,
    "olmoe": _write_experts,
    "qwen2moe": _write_experts,
    "qwen3moe": _write_experts,
}
