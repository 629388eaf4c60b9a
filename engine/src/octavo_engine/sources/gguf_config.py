"""Converts GGUF metadata to the `config.json` that the same model has on the Hugging Face hub.

`GGUFValues.common` returns the config keys that all architectures share; a small rule per architecture adds its own. A
new architecture needs a rule, a line in `_RULES` and its tensor names in `weights/gguf_file.py`. Values that GGUF
does not store (activation, layer pattern, query scale of 27B models) follow llama.cpp's rules.
"""

import struct
from collections.abc import Callable
from typing import Any

from octavo_engine.sources.gguf_header import GGUFFile
from octavo_engine.sources.gguf_values import GGUFValues
from octavo_engine.sources.model_config import ConfigNumbers
from octavo_engine.wire.errors import StartupError

Config = dict[str, Any]

#: Tokens that end a turn. Like llama.cpp, we find them by their text, as many files list only one `eos_token_id`.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"})
_CONTROL, _USER_DEFINED = 3, 4

_GEMMA3_WINDOW_PATTERN = 6
DEFAULT_THETA = 10000.0


def gguf_to_hf_config(header: GGUFFile) -> Config:
    """Convert a header. Raises StartupError for an architecture without a rule, or if a required key is missing."""
    architecture = header.metadata.get("general.architecture")
    rule = _RULES.get(str(architecture))
    if rule is None:
        known = ", ".join(sorted(_RULES))
        raise StartupError(f"{header.path}: GGUF architecture {architecture!r} is not supported, only {known}.")
    try:
        values = GGUFValues(header, str(architecture))
        if values.get("expert_count") and architecture not in _WITH_EXPERTS:
            raise StartupError(f"{header.path}: experts are not supported for the GGUF architecture {architecture!r}.")
        config = values.common()
        ConfigNumbers(str(header.path), config).check_dimensions()
        config |= {**_token_ids(header), **_rope_config(values)}
        rule(values, config)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StartupError(
            f"{header.path}: corrupt GGUF metadata ({problem:.100}): download the file again."
        ) from error
    return config


def _token_ids(header: GGUFFile) -> Config:
    ids = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    named = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    ends = [
        i
        for i, (t, k) in enumerate(zip(tokens, kinds, strict=False))
        if k in (_CONTROL, _USER_DEFINED) and t in _END_OF_TURN
    ]
    config: Config = {"eos_token_id": list(dict.fromkeys([*named, *ends]))}
    if ids["bos"] is not None:
        config["bos_token_id"] = ids["bos"]
    return config


def _llama(values: GGUFValues, config: Config) -> None:
    """Convert Llama, SmolLM, Yi, TinyLlama, Mistral and Mixtral: Mistral has a sliding window, Mixtral has experts."""
    config.setdefault("head_dim", values.get("rope.dimension_count"))
    config["attention_bias"] = values.has_tensor("blk.0.attn_q.bias")
    config["mlp_bias"] = values.has_tensor("blk.0.ffn_up.bias")
    kind = "mistral" if config.get("sliding_window") else "llama"
    if values.get("expert_count"):
        config.update(_experts(values))
        kind = "mixtral"
    _is(config, kind, f"{kind.capitalize()}ForCausalLM")


def _qwen2(values: GGUFValues, config: Config) -> None:
    config.pop("sliding_window", None)  # present in every file, but no published model uses it
    _is(config, "qwen2", "Qwen2ForCausalLM")


def _qwen3(values: GGUFValues, config: Config) -> None:
    config.pop("sliding_window", None)
    config["attention_bias"] = values.has_tensor("blk.0.attn_q.bias")
    _is(config, "qwen3", "Qwen3ForCausalLM")


def _qwen2_moe(values: GGUFValues, config: Config) -> None:
    config.update(_experts(values), norm_topk_prob=False)
    config["moe_intermediate_size"] = _expert_size(values, config)
    shared = values.get("expert_shared_feed_forward_length")
    config["shared_expert_intermediate_size"] = shared or values.require("feed_forward_length")
    config.pop("sliding_window", None)
    _is(config, "qwen2_moe", "Qwen2MoeForCausalLM")


def _qwen3_moe(values: GGUFValues, config: Config) -> None:
    _qwen3(values, config)
    config.update(_experts(values), norm_topk_prob=True)
    config["moe_intermediate_size"] = _expert_size(values, config)
    _is(config, "qwen3_moe", "Qwen3MoeForCausalLM")


def _olmoe(values: GGUFValues, config: Config) -> None:
    config.update(_experts(values), norm_topk_prob=False)
    _is(config, "olmoe", "OlmoeForCausalLM")


def _experts(values: GGUFValues) -> Config:
    """Return the numbers of experts, which a file must have, as llama.cpp sets whether their weights are normalised."""
    return {"num_experts": values.require("expert_count"), "num_experts_per_tok": values.require("expert_used_count")}


def _expert_size(values: GGUFValues, config: Config) -> int:
    """Return an expert's inner size. Old files lack it: the experts of a token then share that of a dense block."""
    size = values.get("expert_feed_forward_length")
    return int(size or values.require("feed_forward_length") // max(1, config["num_experts_per_tok"]))


def _gemma2(values: GGUFValues, config: Config) -> None:
    config.setdefault("sliding_window", 4096)
    config["layer_types"] = _layer_types(values, config["num_hidden_layers"], pattern=2)
    _gemma(config, big_layers=46)
    _is(config, "gemma2", "Gemma2ForCausalLM")


def _gemma3(values: GGUFValues, config: Config) -> None:
    config["layer_types"] = _layer_types(values, config["num_hidden_layers"], _GEMMA3_WINDOW_PATTERN)
    _gemma(config, big_layers=62)
    config["rope_theta"] = values.get("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = values.get("rope.freq_base_swa", DEFAULT_THETA)
    _is(config, "gemma3_text", "Gemma3ForCausalLM")


def _layer_types(values: GGUFValues, count: int, pattern: int) -> list[str]:
    """List the layers' types: every `pattern`-th layer has full attention, unless the file lists the layers."""
    slides = values.get("attention.sliding_window_pattern", pattern)
    if isinstance(slides, int):
        slides = [(layer + 1) % slides != 0 for layer in range(count)] if slides > 1 else [False] * count
    if not values.get("attention.sliding_window") and pattern == _GEMMA3_WINDOW_PATTERN:
        slides = [False] * count
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _gemma(config: Config, big_layers: int) -> None:
    """Set keys of all Gemma models. Their activations overflow float16, so bfloat16 replaces it.

    Only the 27B models, recognised by their number of layers, scale queries by the hidden size per head.
    """
    is_27b = config["num_hidden_layers"] == big_layers
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if is_27b else config["head_dim"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    if config["torch_dtype"] == "float16":
        config["torch_dtype"] = "bfloat16"


def _phi3(values: GGUFValues, config: Config) -> None:
    config["sliding_window"] = config.get("sliding_window") or None
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config["partial_rotary_factor"] = values.get("rope.dimension_count", head_dim) / head_dim
    original = values.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    _is(config, "phi3", "Phi3ForCausalLM")


def _gpt2(values: GGUFValues, config: Config) -> None:
    names = {
        "max_position_embeddings": "n_positions",
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
    }
    for key, gpt2_key in names.items():
        config[gpt2_key] = config.pop(key)
    for key in ("rope_theta", "num_key_value_heads"):
        config.pop(key, None)
    config["layer_norm_epsilon"] = values.get("attention.layer_norm_epsilon", 1e-5)
    config["activation_function"] = "gelu_new"
    _is(config, "gpt2", "GPT2LMHeadModel")


def _is(config: Config, model_type: str, architecture: str) -> None:
    config["model_type"], config["architectures"] = model_type, [architecture]
    if model_type != "gpt2" and not model_type.startswith("gemma"):
        config["hidden_act"] = "silu"


_RULES: dict[str, Callable[[GGUFValues, Config], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
_WITH_EXPERTS = ("llama", "qwen2moe", "qwen3moe", "olmoe")


def _rope_config(values: GGUFValues) -> dict[str, Any]:
    """Convert RoPE parameters.

    llama.cpp stores llama3 and longrope scaling as tensors of one factor per frequency (`rope_freqs`,
    `rope_factors_long/short`). Hugging Face's `longrope` divides each frequency by its factor, which is the meaning of
    these tensors: so both become `longrope`, for llama3 with an explicit attention factor of 1.
    """
    config: dict[str, Any] = {"rope_theta": values.get("rope.freq_base", DEFAULT_THETA)}
    scaling = _rope_factors(values) or _rope_scaling(values)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(values: GGUFValues) -> dict[str, Any] | None:
    kind, factor = values.get("rope.scaling.type"), values.get("rope.scaling.factor")
    if factor is None and values.get("rope.scale_linear"):
        kind, factor = "linear", values.get("rope.scale_linear")
    if kind in (None, "none") or not factor or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise StartupError(f"{values.header.path}: RoPE scaling {kind!r} without its factor tensors is not supported.")
    scaling = {"rope_type": "yarn", "factor": factor}
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    scaling |= {ours: values.get(f"rope.scaling.{key}") for key, ours in names.items()}
    return {key: value for key, value in scaling.items() if value is not None}


def _rope_factors(values: GGUFValues) -> dict[str, Any] | None:
    tensors = values.header.tensors
    short = tensors.get("rope_freqs.weight") or tensors.get("rope_factors_short.weight")
    long = tensors.get("rope_freqs.weight") or tensors.get("rope_factors_long.weight")
    if short is None or long is None:
        return None
    context = values.get("context_length")
    original = values.get("rope.scaling.original_context_length", context)
    scaling = {
        "rope_type": "longrope",
        "short_factor": _read_floats(values.header, short.name),
        "long_factor": _read_floats(values.header, long.name),
        "original_max_position_embeddings": original,
        "factor": context / original,
    }
    attention_factor = 1.0 if short is long else values.get("rope.scaling.attn_factor")
    return scaling if attention_factor is None else {**scaling, "attention_factor": attention_factor}


def _read_floats(header: GGUFFile, name: str) -> list[float]:
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise StartupError(f"{header.path}: tensor {name!r} is {tensor.type.name} {tensor.shape}, not a row of F32.")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))
