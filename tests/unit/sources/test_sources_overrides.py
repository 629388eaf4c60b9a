"""`hf_overrides`: keys that replace those of a model's config.json."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.sources.model_config import flatten_config, rope_parameters
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.pooling import load_served_model
from octavo_engine.sources.resolve import resolve_files
from octavo_engine.wire.errors import StartupError
from octavo_testing.scripted import write_byte_model
from transformers import Gemma3TextConfig, LlamaConfig

LINEAR = {"rope_type": "linear", "factor": 2.0}
#: RoPE settings in the spelling of transformers 4: of the model, and overrides.
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": LINEAR, "partial_rotary_factor": 0.5},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
)
ROPE_OVERRIDES: tuple[dict[str, Any], ...] = (
    {"rope_theta": 7.0},
    {"partial_rotary_factor": 0.25},
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 3.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 3.0}, "rope_theta": 7.0},
)
PER_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_byte_model(tmp_path)


def set_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    others = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("rope_")}
    path.write_text(json.dumps(others | keys))


def overridden(folder: Path, overrides: dict[str, Any]) -> ModelFiles:
    return resolve_files(resolve_config(model=str(folder), load_format="dummy", hf_overrides=overrides))


def ropes_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """RoPE parameters as Octavo reads them, and as transformers does, which writes to its argument."""
    family = Gemma3TextConfig if config.get("rope_parameters", {}).get("full_attention") else LlamaConfig
    return [rope_parameters(config), family.from_dict(deepcopy(config)).rope_parameters]


def in_one_object(rope: dict[str, Any]) -> dict[str, Any]:
    """Spell settings as transformers 5 does."""
    beside = {key: value for key, value in rope.items() if key != "rope_scaling"}
    return {"rope_parameters": {"rope_type": "default", **rope.get("rope_scaling", {}), **beside}}


def test_overrides_replace_any_key_of_the_config(folder: Path) -> None:
    """Objects are replaced whole, except those of nested configs, whose keys are replaced one by one."""
    set_config(folder, rope_scaling={"factor": 2}, vision_config={"a": {"b": 1}, "c": 2})
    overrides = {"max_position_embeddings": 77, "rope_scaling": None, "vision_config": {"a": {"d": 3}}, "mine": [1]}
    config = resolve_config(model=str(folder), load_format="dummy", hf_overrides=json.dumps(overrides))
    files = resolve_files(config)
    assert files.config["vision_config"] == {"a": {"d": 3}, "c": 2}
    assert {key: files.config[key] for key in ("rope_scaling", "mine")} == {"rope_scaling": None, "mine": [1]}
    model = load_served_model(config, files)
    assert (model.max_position_embeddings, model.pooling) == (77, None)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("overrides", ROPE_OVERRIDES)
def test_overrides_of_rope_have_one_effect_on_both_spellings(
    folder: Path, rope: dict[str, Any], overrides: dict[str, Any], is_nested: bool
) -> None:
    found = []
    for keys in (rope, in_one_object(rope)):
        nested, given = ({"text_config": part} if is_nested else part for part in (keys, overrides))
        set_config(folder, **{"text_config": None, "partial_rotary_factor": None, **nested})
        found.append(ropes_of(flatten_config(overridden(folder, given).config)))
    assert found[0] == found[1]
    expected = {"rope_theta": 5e5, **rope, **overrides}
    for parameters in found[0]:
        assert parameters["rope_theta"] == expected["rope_theta"]
        assert parameters.get("partial_rotary_factor") == expected.get("partial_rotary_factor")
        scaling = {"rope_type": "default", **(expected.get("rope_scaling") or {})}
        assert {key: parameters[key] for key in scaling} == scaling
        assert ("factor" in parameters) == ("factor" in scaling)


@pytest.mark.parametrize("rope", [ROPES[1], in_one_object(ROPES[1])])
def test_parameters_of_rope_are_replaced_whole(folder: Path, rope: dict[str, Any]) -> None:
    set_config(folder, **rope)
    new = {"rope_type": "yarn", "rope_theta": 9.0, "factor": 2.0}
    for parameters in ropes_of(overridden(folder, {"rope_parameters": new}).config):
        assert {key: parameters[key] for key in new} == new


@pytest.mark.parametrize("rope", [ROPES[1], in_one_object(ROPES[1])])
@pytest.mark.parametrize("scaling", ["linear", [LINEAR], 2])
def test_a_scaling_that_is_no_object_is_refused(folder: Path, rope: dict[str, Any], scaling: Any) -> None:
    set_config(folder, **rope)
    with pytest.raises(StartupError, match="must be a JSON object, got"):
        rope_parameters(overridden(folder, {"rope_scaling": scaling}).config)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"])
def test_one_rope_for_all_layers_does_not_replace_one_per_type(folder: Path, key: str, is_nested: bool) -> None:
    keys, overrides = {"rope_parameters": PER_LAYER}, {key: None}
    set_config(folder, **({"text_config": keys} if is_nested else keys))
    with pytest.raises(StartupError, match=f"{key} .*full_attention, sliding_attention.*rope_parameters") as refused:
        overridden(folder, {"text_config": overrides} if is_nested else overrides)
    assert len(str(refused.value).splitlines()) == 1


def test_rope_of_each_layer_type_is_replaced(folder: Path) -> None:
    set_config(folder, rope_parameters=PER_LAYER)
    new = PER_LAYER | {"full_attention": {"rope_type": "default", "rope_theta": 2e6}}
    assert ropes_of(overridden(folder, {"rope_parameters": new}).config) == [new, new]


@pytest.mark.parametrize("settings", [None, {}])
def test_a_quantisation_may_be_overridden_by_none(folder: Path, settings: Any) -> None:
    set_config(folder, quantization_config={"quant_method": "mxfp4"})
    assert overridden(folder, {"quantization_config": settings}).quantisation is None


@pytest.mark.parametrize("own", [{}, {"quantization_config": {"quant_method": "mxfp4"}}])
def test_an_overridden_quantisation_is_read(folder: Path, own: dict[str, Any]) -> None:
    set_config(folder, **own)
    with pytest.raises(StartupError, match="bitnet"):
        overridden(folder, {"quantization_config": {"quant_method": "bitnet"}})
