"""`ModelConfig`: defaults, both generations of transformers' keys, nested configs, and unusable ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.sources.gguf_values import shortest_float
from octavo_engine.sources.model_config import context_length, load_model_config, rope_parameters
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError
from octavo_testing.gguf_checkpoints import TINY_CONFIGS
from safetensors.torch import save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def files(config: dict[str, Any], generation: dict[str, Any] | None = None, **fields: Any) -> ModelFiles:
    defaults = {"name": "m", "root": Path(), "load_format": "safetensors", "generation": generation or {}}
    return ModelFiles(**{**defaults, "config": config, **fields})


def test_defaults_follow_from_the_heads() -> None:
    config = load_model_config(files(LLAMA))
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, "float32")
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)
    explicit = load_model_config(files({**LLAMA, "num_key_value_heads": 2, "head_dim": 32}))
    assert (explicit.num_kv_heads, explicit.head_dim) == (2, 32)


def test_keys_that_an_architecture_does_not_have_are_not_read() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
    found = load_model_config(files({**gpt2, "n_positions": 64, "head_dim": 3, "num_key_value_heads": "x"}))
    assert (found.head_dim, found.num_kv_heads) == (4, 2)
    opt = load_model_config(files({**LLAMA, "architectures": ["OPTForCausalLM"], "num_key_value_heads": 3}))
    assert opt.num_kv_heads == 4


def test_the_keys_of_other_architectures_are_left_to_transformers() -> None:
    found = load_model_config(files({"architectures": ["MptForCausalLM"], "vocab_size": 9, "hidden_size": "x"}))
    assert (found.architecture, found.vocab_size, found.hidden_size) == ("MptForCausalLM", 9, 0)
    assert context_length(found) == 0


def test_null_means_default() -> None:
    config = load_model_config(files({**LLAMA, "num_key_value_heads": None, "head_dim": None}))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


def test_gpt2_keys_are_read() -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
    found = load_model_config(files({**config, "n_positions": 64}))
    assert (found.hidden_size, found.num_layers, found.num_heads, found.max_position_embeddings) == (8, 1, 2, 64)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("value", "expected"), [("bfloat16", "bfloat16"), ("torch.float16", "float16")])
def test_dtype_is_read_in_both_spellings(key: str, value: str, expected: str) -> None:
    assert load_model_config(files({**LLAMA, key: value})).dtype == expected


def test_dtype_defaults_to_the_files_dtype(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"norm": torch.ones(4), "w": torch.ones(8, 8, dtype=torch.bfloat16)}, path)
    assert load_model_config(files(LLAMA, weight_files=(path,))).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [7, 2]}, {"eos_token_id": 2}, (7, 2)),
        ({"eos_token_id": 7}, {"eos_token_id": [2, 3]}, (7, 2, 3)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
    ],
)
def test_eos_ids_are_merged(generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert load_model_config(files({**LLAMA, **config}, generation)).eos_token_ids == expected


def test_bos_prefers_the_generation_config() -> None:
    assert load_model_config(files({**LLAMA, "bos_token_id": 1}, {"bos_token_id": 5})).bos_token_id == 5
    assert load_model_config(files({**LLAMA, "bos_token_id": 0})).bos_token_id == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size .* got None: use a whole number from 1 to 1048576"),
        ({"vocab_size": 0}, "vocab_size .* got 0: use a whole number from 1 to 16777216"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
    ],
)
def test_an_unusable_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        load_model_config(files({**LLAMA, **change}))


def test_gemma3_nested_text_config_is_flattened() -> None:
    """The text_config in gemma-3-4b's config.json has only keys that differ from the defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    config = load_model_config(files(outer))
    assert config.architecture == "Gemma3ForCausalLM"
    assert (config.hidden_size, config.head_dim, config.num_kv_heads, config.vocab_size) == (2560, 256, 4, 262_208)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert "vision_config" not in config.hf
    assert config.hf["rope_local_base_freq"] == 10_000.0


def test_rope_of_transformers_4_and_5_is_equal() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert rope_parameters(old) == rope_parameters(new) == {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert rope_parameters({}) == {"rope_theta": 10000.0, "rope_type": "default"}
    assert rope_parameters({"rope_scaling": None, "rope_theta": 7.0}) == {"rope_theta": 7.0, "rope_type": "default"}


def test_rope_includes_the_keys_that_phi3_keeps_outside() -> None:
    hf = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
    rope = rope_parameters(hf)
    assert (rope["original_max_position_embeddings"], rope["partial_rotary_factor"]) == (4096, 0.75)


def test_rope_may_differ_per_layer_type() -> None:
    kinds = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, "sliding_attention": None}
    rope = rope_parameters({"rope_parameters": kinds, "rope_theta": 1e4})
    assert rope["full_attention"]["factor"] == 8.0
    assert rope["sliding_attention"] == {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 512),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 256}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256}}, 512),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, 512),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 512),
    ],
)
def test_rope_scaling_extends_the_context_length(change: dict[str, Any], expected: int) -> None:
    assert context_length(load_model_config(files({**LLAMA, **change}))) == expected


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"])
@pytest.mark.parametrize("architecture", [name for name, (kind, _) in TINY_CONFIGS.items() if kind != "gpt2"])
def test_a_models_rope_and_its_length_have_one_type(architecture: str, kind: str) -> None:
    """The length of the context is that of the RoPE that the model computes, also where a family renames types."""
    model_type, options = TINY_CONFIGS[architecture]
    names = {"su": "longrope", "yarn": "longrope"} if model_type == "phi3" else {}
    scaling = {"type": kind, "factor": 2.0, "original_max_position_embeddings": 32}
    hf = {"model_type": model_type, **options, "rope_parameters": scaling, "max_position_embeddings": 64}
    config = load_model_config(files({**LLAMA, **hf}))
    built = rope_parameters(config.hf)["rope_type"]
    assert built == names.get(kind, kind)
    scaled = {} if model_type.startswith("gemma3") else {"linear": 128, "dynamic": 128}
    assert context_length(config) == scaled.get(built, 64)


@pytest.mark.parametrize("architecture", sorted(TINY_CONFIGS))
def test_configs_written_by_transformers_are_read(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type, options = TINY_CONFIGS[architecture]
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    theirs = AutoConfig.for_model(model_type, architectures=[name], **options)
    theirs.save_pretrained(tmp_path)
    config = load_model_config(files(json.loads((tmp_path / "config.json").read_text())))
    assert (config.hidden_size, config.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert config.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    if model_type == "gemma3_text":
        assert rope_parameters(config.hf)["full_attention"]["rope_theta"] == 1_000_000.0
    elif model_type != "gpt2":
        assert rope_parameters(config.hf)["rope_theta"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("value", [1e-5, 1e-6, 1e6, 0.1, 30.0, 0.0, -2.5, 0.33333334])
def test_floats_are_returned_as_written(value: float) -> None:
    assert shortest_float(torch.tensor(value, dtype=torch.float32).item()) == value
