"""GGUF metadata that no tiny model covers: RoPE scaling, layer patterns, ends of turn, and unsupported files."""

from pathlib import Path
from typing import Any

import pytest
from octavo_engine.sources.gguf_config import gguf_to_hf_config
from octavo_engine.sources.gguf_header import GGML_TYPES, GGUFFile, GGUFTensor
from octavo_engine.wire.errors import StartupError

REQUIRED = {"context_length": 4096, "block_count": 2, "embedding_length": 64, "attention.head_count": 4}


def header(architecture: str, keys: dict[str, Any], *tensors: GGUFTensor, **other: Any) -> GGUFFile:
    metadata = {f"{architecture}.{key}": value for key, value in {**REQUIRED, **keys}.items()}
    metadata |= {"general.architecture": architecture, **other}
    embedding = make_tensor("token_embd.weight", (100, 64))
    found = {tensor.name: tensor for tensor in (embedding, *tensors)}
    return GGUFFile(path=Path("m.gguf"), version=3, metadata=metadata, tensors=found)


def make_tensor(name: str, shape: tuple[int, ...], kind: int = 2) -> GGUFTensor:
    return GGUFTensor(name=name, shape=shape, type=GGML_TYPES[kind], offset=0, num_bytes=0)


def config_of(architecture: str, keys: dict[str, Any], *tensors: GGUFTensor, **other: Any) -> dict[str, Any]:
    return gguf_to_hf_config(header(architecture, keys, *tensors, **other))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 1024,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_is_converted(keys: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert config_of("llama", keys).get("rope_scaling") == expected


def test_longrope_without_factors_is_refused() -> None:
    with pytest.raises(StartupError, match=r"m\.gguf: RoPE scaling 'longrope' without its factor tensors"):
        config_of("phi3", {"rope.scaling.type": "longrope", "rope.scaling.factor": 32.0})


def test_quantised_files_compute_in_half_precision() -> None:
    assert config_of("llama", {})["torch_dtype"] == "float16"
    gemma = {"attention.key_length": 16, "attention.sliding_window": 8}
    assert config_of("gemma2", gemma)["torch_dtype"] == "bfloat16"


def test_embeddings_are_tied_only_without_an_output_matrix() -> None:
    assert config_of("llama", {})["tie_word_embeddings"] is True
    assert config_of("llama", {}, make_tensor("output.weight", (100, 64)))["tie_word_embeddings"] is False


def test_mistral_is_recognised_by_its_window() -> None:
    assert config_of("llama", {"attention.sliding_window": 1024})["architectures"] == ["MistralForCausalLM"]
    assert config_of("llama", {})["architectures"] == ["LlamaForCausalLM"]


def test_ends_of_turn_are_found_by_id_and_by_text() -> None:
    tokens = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<|eot_id|>", "<|end|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [3, 3, 3, 4, 1],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
    }
    assert config_of("llama", {}, **tokens)["eos_token_id"] == [1, 2, 3]


def test_old_files_with_experts_lack_their_sizes() -> None:
    """Then the experts of a token share the size of the dense block, which the shared expert has."""
    experts = {"feed_forward_length": 5632, "expert_count": 60, "expert_used_count": 4}
    config = config_of("qwen2moe", experts)
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (1408, 5632)
    sizes = {"expert_feed_forward_length": 100, "expert_shared_feed_forward_length": 200}
    config = config_of("qwen2moe", experts | sizes)
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (100, 200)


GEMMA = {"attention.key_length": 16, "attention.sliding_window": 8, "block_count": 7}


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("gemma2", {}, "SFSFSFS"),
        ("gemma3", {}, "SSSSSFS"),
        ("gemma3", {"attention.sliding_window": None}, "FFFFFFF"),
        ("gemma3", {"attention.sliding_window_pattern": [True, False] * 3 + [True]}, "SFSFSFS"),
        ("gemma3", {"attention.sliding_window_pattern": 3}, "SSFSSFS"),
    ],
)
def test_layer_patterns_are_converted(architecture: str, keys: dict[str, Any], expected: str) -> None:
    types = config_of(architecture, {**GEMMA, **keys})["layer_types"]
    assert "".join(kind[0].upper() for kind in types) == expected


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"), [("gemma2", 42, 16), ("gemma2", 46, 8), ("gemma3", 34, 16), ("gemma3", 62, 8)]
)
def test_only_the_27b_models_scale_queries_by_the_hidden_size(architecture: str, layers: int, scalar: int) -> None:
    keys = {**GEMMA, "block_count": layers, "attention.head_count": 8}
    assert config_of(architecture, keys)["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("mamba", {}, "GGUF architecture 'mamba' is not supported, only gemma2, gemma3, gpt2, llama"),
        ("llama", {"block_count": None}, "metadata lacks llama.block_count"),
        ("gemma2", {"expert_count": 8}, "experts are not supported for the GGUF architecture 'gemma2'"),
        ("llama", {"expert_count": 8}, "metadata lacks llama.expert_used_count"),
        ("llama", {"attention.head_count_kv": [4, 2]}, "num_key_value_heads differs between layers"),
    ],
)
def test_an_unsupported_file_is_refused(architecture: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        config_of(architecture, keys)


def test_a_vocabulary_without_weights_is_refused() -> None:
    found = header("llama", {})
    found.tensors.clear()
    with pytest.raises(StartupError, match=r"m\.gguf: has no tensor 'token_embd\.weight'"):
        gguf_to_hf_config(found)
