"""`dtype auto`: the rule, the cached measurement, and the measured shapes."""

from pathlib import Path

import pytest
import torch
from octavo_engine.devices import dtype
from octavo_engine.devices.dtype import GemmShape, choose_cpu_dtype, faster_type, layer_shapes
from octavo_engine.settings.records import ModelConfig


def model(**hf: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        dtype="bfloat16",
        hf=dict(hf),
    )


@pytest.mark.parametrize(
    ("bf16", "fp32", "want"),
    [
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "bfloat16"),
        ([1.0, 2.0, 4.0], [2.0, 1.0, 1.0], "float32"),
        ([1.0, 1.0, 1.0], [0.95, 0.95, 0.95], "bfloat16"),
        ([1.0, 1.0, 1.0], [0.5, 1.0, 1.0], "float32"),
    ],
)
def test_the_faster_type_is_chosen(bf16: list[float], fp32: list[float], want: str) -> None:
    assert faster_type({"bfloat16": bf16, "float32": fp32}) == want


def test_layer_shapes_are_those_of_the_fused_projections() -> None:
    assert layer_shapes(model(intermediate_size=48))[2:] == [
        GemmShape(in_features=32, out_features=96),
        GemmShape(in_features=48, out_features=32),
    ]
    assert layer_shapes(model(ffn_dim=50))[3] == GemmShape(in_features=50, out_features=32)
    assert layer_shapes(model())[3] == GemmShape(in_features=128, out_features=32)
    assert layer_shapes(model())[:2] == [
        GemmShape(in_features=32, out_features=64),
        GemmShape(in_features=32, out_features=32),
    ]


def test_times_are_measured_once_and_then_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dtype, "_BUDGET_S", 0.001)
    monkeypatch.setattr(dtype, "_BEYOND_CACHE_BYTES", 1 << 12)
    first = choose_cpu_dtype(model(intermediate_size=48))
    assert first in (torch.bfloat16, torch.float32)
    (kept,) = (tmp_path / "octavo").glob("dtype-*")
    kept.write_text('{"bfloat16": [9, 9, 9], "float32": [1, 1, 1]}')
    assert choose_cpu_dtype(model(intermediate_size=48)) == torch.float32
    choose_cpu_dtype(model(intermediate_size=64))
    assert len(list((tmp_path / "octavo").glob("dtype-*"))) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"bfloat16": 1}', '{"bfloat16": ["x"], "float32": []}'])
def test_a_broken_cache_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dtype, "_BUDGET_S", 0.001)
    monkeypatch.setattr(dtype, "_BEYOND_CACHE_BYTES", 1 << 12)
    choose_cpu_dtype(model())
    (kept,) = (tmp_path / "octavo").glob("dtype-*")
    kept.write_text(text)
    choose_cpu_dtype(model())
    assert kept.read_text().startswith('{"bfloat16": [')


def test_an_unwritable_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(dtype, "_BUDGET_S", 0.001)
    monkeypatch.setattr(dtype, "_BEYOND_CACHE_BYTES", 1 << 12)
    assert choose_cpu_dtype(model()) in (torch.bfloat16, torch.float32)


def test_times_are_measured_again_without_our_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dtype, "_measure", lambda shapes, kind: [1.0, 1.0, 1.0])
    for library in (object(), None, object()):
        monkeypatch.setattr(dtype, "native_library", lambda found=library: found)
        choose_cpu_dtype(model(intermediate_size=48))
    assert len(list((tmp_path / "octavo").glob("dtype-*"))) == 2
