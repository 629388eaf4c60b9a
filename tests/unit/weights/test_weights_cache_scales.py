"""Scales of an FP8 cache in a checkpoint: vLLM's names for them, and values that end the start in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights, read_cache_scales
from octavo_engine.wire.errors import StartupError
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "quantised_checkpoints" / "fp8_tensor"
LAYER = "model.layers.0.self_attn"


def with_tensors(folder: Path, tensors: dict[str, Tensor]) -> ModelFiles:
    shutil.copytree(FOLDER, folder)
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    return resolve_model(str(folder))


@pytest.mark.parametrize(
    ("scales", "want"),
    [
        ({}, {}),
        ({"k_scale": 0.25, "v_scale": 0.5}, {0: (0.25, 0.5)}),
        ({"attn.k_scale": 0.25, "attn.v_scale": 0.5}, {0: (0.25, 0.5)}),
        ({"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}, {0: (0.25, 0.5)}),
        ({"qkv_proj.k_scale": 0.25, "qkv_proj.v_scale": 0.5}, {0: (0.25, 0.5)}),
        ({"k_proj.output_scale": 0.25, "v_proj.output_scale": 0.5, "q_proj.output_scale": 2.0}, {0: (0.25, 0.5)}),
        ({"kv_scale": 0.25}, {0: (0.25, 0.25)}),
        ({"k_scale": 0.25}, {0: (0.25, 0.25)}),
        ({"q_scale": 0.25, "k_zero_point": 0.0, "o_proj.output_scale": 2.0}, {}),
    ],
    ids=str,
)
def test_the_names_of_vllm_are_read(
    scales: dict[str, float], want: dict[int, tuple[float, float]], tmp_path: Path
) -> None:
    for at, (shape, dtype) in enumerate([((1,), torch.float32), ((), torch.bfloat16)]):
        tensors = {f"{LAYER}.{name}": torch.full(shape, value, dtype=dtype) for name, value in scales.items()}
        files = with_tensors(tmp_path / str(at), tensors)
        assert read_cache_scales(files) == want
        assert not tensors.keys() & dict(iter_weights(files)).keys()


def test_names_of_a_multimodal_checkpoint_are_those_of_its_text_part(tmp_path: Path) -> None:
    names = {f"language_model.{LAYER}.k_scale": 0.5, "vision_tower.layers.0.self_attn.v_scale": 8.0}
    files = with_tensors(tmp_path / "m", {name: torch.tensor(value) for name, value in names.items()})
    config = json.loads((files.root / "config.json").read_text())
    (files.root / "config.json").write_text(json.dumps(config | {"text_config": {}}))
    assert read_cache_scales(resolve_model(str(files.root))) == {0: (0.5, 0.5)}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.tensor(0.0), "is 0.0"),
        (torch.tensor(-1.0), "is -1.0"),
        (torch.tensor(float("inf")), "is inf"),
        (torch.tensor(float("nan")), "is nan"),
        (torch.tensor(1e-40), "is 9.99"),
        (torch.ones(2), "has 2 values"),
        (torch.ones(0), "has 0 values"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_other_values_are_refused_with_a_remedy(value: Tensor, found: str, tmp_path: Path) -> None:
    files = with_tensors(tmp_path / "m", {f"{LAYER}.k_scale": value})
    with pytest.raises(StartupError, match=rf"^tensor '{LAYER}\.k_scale' {found}.*one positive number: leave out --kv"):
        read_cache_scales(files)


def test_an_unquantised_checkpoint_has_no_scales(tmp_path: Path) -> None:
    files = with_tensors(tmp_path / "m", {})
    config = json.loads((files.root / "config.json").read_text())
    del config["quantization_config"]
    (files.root / "config.json").write_text(json.dumps(config))
    assert read_cache_scales(resolve_model(str(files.root))) == {}
