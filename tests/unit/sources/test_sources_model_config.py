"""`ModelConfig`: defaults, both generations of transformers' keys, nested configs, and unusable ones."""

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from octavo_engine.sources import model_config
from octavo_engine.sources.gguf_values import shortest_float
from octavo_engine.sources.model_config import ConfigNumbers, context_length, load_model_config, rope_parameters
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


SMOLVLM: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "image_token_id": 49_190,
    "torch_dtype": "bfloat16",
    "text_config": {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "vocab_size": 49_280},
    "vision_config": {"model_type": "smolvlm_vision", "hidden_size": 768},
}


def test_a_model_that_takes_images_has_the_config_of_its_text_part() -> None:
    config = load_model_config(files(SMOLVLM))
    assert (config.architecture, config.hidden_size, config.head_dim) == ("LlamaForCausalLM", 576, 64)
    assert (config.num_layers, config.hf["rms_norm_eps"], config.eos_token_ids) == (32, 1e-6, (2,))
    assert config.vision is not None
    assert (config.vision.family, config.vision.image_token_id, config.vision.hf) == ("smolvlm", 49_190, SMOLVLM)


def test_llava_1_5_omits_the_sizes_of_its_text_part() -> None:
    text = {"_name_or_path": "lmsys/vicuna-7b-v1.5", "max_position_embeddings": 4096, "model_type": "llama"}
    text |= {"rms_norm_eps": 1e-05, "vocab_size": 32_064}
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32_000}
    config = load_model_config(files({**outer, "text_config": text, "vision_config": {"hidden_size": 1024}}))
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.vocab_size) == (4096, 32, 32, 32_064)
    assert (config.hf["intermediate_size"], config.hf["rms_norm_eps"]) == (11_008, 1e-5)
    assert config.vision is not None
    assert config.vision.image_token_id == 32_000


def test_a_null_of_a_nested_config_is_not_the_default() -> None:
    """Checkpoints with a text part of Mistral switch its window off."""
    text = {"hidden_size": 5120, "head_dim": 128, "num_attention_heads": 32, "model_type": "mistral"}
    text |= {"num_hidden_layers": 40, "num_key_value_heads": 8, "rope_theta": 1e9, "sliding_window": None}
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
    config = load_model_config(files({**outer, "text_config": text}))
    assert (config.architecture, config.num_layers, config.head_dim) == ("MistralForCausalLM", 40, 128)
    assert ConfigNumbers.of(config).window(4096) is None
    text |= {"num_key_value_heads": None, "head_dim": None, "eos_token_id": None}
    plain = load_model_config(files({**outer, "text_config": text, "eos_token_id": 7}))
    assert (plain.num_kv_heads, plain.head_dim, plain.eos_token_ids) == (32, 160, (7,))


QWEN2_5_VL: dict[str, Any] = {  # of Qwen/Qwen2.5-VL-3B-Instruct
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "vision_token_id": 151_654,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11_008,
    "max_position_embeddings": 128_000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32_768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "in_chans": 3, "out_hidden_size": 2048},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151_936,
}
QWEN3_VL_TEXT: dict[str, Any] = {  # of Qwen/Qwen3-VL-2B-Instruct
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262_144,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5_000_000,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}


def test_a_flat_config_of_qwen_vl_is_that_of_its_nested_form() -> None:
    outer = {"architectures", "image_token_id", "model_type", "video_token_id", "vision_config"}
    outer |= {key for key in QWEN2_5_VL if key.startswith("vision")}
    text = {key: value for key, value in QWEN2_5_VL.items() if key not in outer}
    nested = {key: QWEN2_5_VL[key] for key in outer} | {"text_config": text | {"model_type": "qwen2_5_vl_text"}}
    config = load_model_config(files(QWEN2_5_VL))
    assert config == load_model_config(files(nested))
    assert (config.architecture, config.hidden_size, config.head_dim) == ("Qwen2ForCausalLM", 2048, 128)
    assert (config.dtype, config.eos_token_ids, config.hf["tie_word_embeddings"]) == ("bfloat16", (151_645,), True)
    rope = rope_parameters(config.hf)
    assert (rope["rope_type"], rope["rope_theta"], rope["mrope_section"]) == ("default", 1e6, [16, 24, 24])
    assert not rope["mrope_interleaved"]
    assert config.vision is not None
    assert (config.vision.family, config.vision.image_token_id) == ("qwen2_5_vl", 151_655)
    theirs = transformers.CONFIG_MAPPING["qwen2_5_vl"].from_dict(config.vision.hf)
    assert theirs.text_config.rope_parameters["mrope_section"] == [16, 24, 24]
    assert (theirs.text_config.num_hidden_layers, theirs.vision_config.depth) == (36, 32)


def test_the_coordinates_of_qwen3_vl_take_turns() -> None:
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151_655}
    config = load_model_config(files({**outer, "text_config": QWEN3_VL_TEXT, "vision_config": {"depth": 24}}))
    assert (config.architecture, config.num_layers, config.dtype) == ("Qwen3ForCausalLM", 28, "bfloat16")
    rope = rope_parameters(config.hf)
    assert (rope["mrope_section"], rope["mrope_interleaved"]) == ([24, 20, 20], True)


@pytest.mark.parametrize("kind", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"])
def test_coordinates_have_the_default_sections_of_transformers(kind: str) -> None:
    sections = rope_parameters({"model_type": kind})["mrope_section"]
    models = import_module(transformers.CONFIG_MAPPING[kind].__module__.replace("configuration", "modeling"))
    assert f'"mrope_section", {sections})' in inspect.getsource(models)
    assert "mrope_section" not in rope_parameters({"model_type": "qwen2"})


def test_the_experts_of_qwen3_vl_are_refused_by_name() -> None:
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    says = "'Qwen3VLMoeForConditionalGeneration' is not supported: .* qwen3_vl, smolvlm"
    with pytest.raises(StartupError, match=says):
        load_model_config(files({**config, "text_config": {"model_type": "qwen3_vl_moe_text"}, "vision_config": {}}))


NESTED = {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}


@pytest.mark.parametrize("kind", sorted(NESTED))
def test_defaults_of_nested_configs_are_those_of_transformers(kind: str) -> None:
    theirs = transformers.CONFIG_MAPPING[kind]().to_dict()
    rope = theirs.get("rope_parameters") or {}
    theirs |= {"rope_theta": rope.get("full_attention", rope).get("rope_theta")}
    theirs |= {"rope_local_base_freq": rope.get("sliding_attention", {}).get("rope_theta")}
    theirs.setdefault("tie_word_embeddings", False)  # Qwen-VL's stands outside of `text_config`
    listed = model_config._NESTED_DEFAULTS[kind]
    assert listed == {key: theirs[key] for key in listed}
    required = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    assert required | {"max_position_embeddings", "rms_norm_eps"} <= listed.keys()
    own = {"num_key_value_heads": theirs["num_attention_heads"], "tie_word_embeddings": False, "rope_theta": 10_000.0}
    if kind != "gemma3_text":  # its checkpoints state these
        own |= {"eos_token_id": None, "bos_token_id": None}
    differing = {key for key, value in own.items() if theirs.get(key) != value}
    assert differing <= listed.keys(), "transformers' default is another one than that of a flat config here"


@pytest.mark.parametrize("family", sorted(model_config.VISION_FAMILIES))
def test_the_default_image_token_is_that_of_transformers(family: str) -> None:
    config = {"model_type": family, "architectures": ["x"], "text_config": {}, "vision_config": {}}
    found, theirs = load_model_config(files(config)).vision, transformers.CONFIG_MAPPING[family]()
    assert found is not None
    assert found.image_token_id == theirs.image_token_id


@pytest.mark.parametrize("family", sorted(model_config.VISION_FAMILIES))
def test_parts_without_a_type_have_that_of_transformers(family: str) -> None:
    config = {"model_type": family, "architectures": ["x"], "text_config": {}, "vision_config": {}}
    theirs = transformers.CONFIG_MAPPING[family](text_config={}, vision_config={})
    assert load_model_config(files(config)).hf["model_type"] == theirs.text_config.model_type
    towers = model_config.VISION_FAMILIES[family][0] or (theirs.vision_config.model_type,)
    assert towers[0] == theirs.vision_config.model_type
    assert len(set(towers)) == len(towers)


@pytest.mark.parametrize("stated", [None, True, False])
@pytest.mark.parametrize("head", [None, "lm_head.weight", "language_model.lm_head.weight"])
def test_a_tensor_in_the_files_decides_whether_the_head_is_tied(
    tmp_path: Path, stated: bool | None, head: str | None
) -> None:
    tensors = {"model.text_model.embed_tokens.weight": torch.zeros(2, 2)}
    tensors |= {} if head is None else {head: torch.zeros(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = SMOLVLM if stated is None else {**SMOLVLM, "tie_word_embeddings": stated}
    found = load_model_config(files(config, weight_files=(tmp_path / "model.safetensors",)))
    assert found.hf["tie_word_embeddings"] == (head is None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["AriaForConditionalGeneration"], "model_type": "aria"},
            f"'AriaForConditionalGeneration' is not supported: .* of type {', '.join(model_config.VISION_FAMILIES)};",
        ),
        (
            {"model_type": "llava", "architectures": ["L"], "vision_config": {"model_type": "siglip_vision_model"}},
            "'llava' with a vision tower of type 'siglip_vision_model' .* clip_vision_model, pixtral",
        ),
        (
            {
                "model_type": "llava",
                "architectures": ["L"],
                "text_config": {"model_type": "gemma"},
                "vision_config": {},
            },
            "'llava' with a text part of type 'gemma' .* llama, mistral, qwen2, .* qwen3",
        ),
        (
            {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "text_config": None},
            "own code, which is never run: .* OpenGVLab/InternVL3-1B-hf",
        ),
        ({"image_token_id": "x"}, "image_token_id .* got 'x': use a whole number"),
    ],
)
def test_a_tower_or_text_part_without_a_rule_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        load_model_config(files({**SMOLVLM, **config}))


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
