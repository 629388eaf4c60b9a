"""A dry run reports the same numbers as a start, for every architecture and for many flags."""

from pathlib import Path
from typing import Any

import pytest
from octavo_engine.devices import dtype
from octavo_engine.runner.capacity import plan_capacity
from octavo_engine.runner.load import load
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import TINY, make_tiny

REPORTED = (
    "dtype",
    "device",
    "max_model_len",
    "block_size",
    "num_blocks",
    "num_host_blocks",
    "weights_bytes",
    "kv_bytes",
)


def assert_same_report(config: EngineConfig) -> None:
    planned = plan_capacity(config)
    executor, ready = load(config)
    executor.shutdown()
    assert {name: getattr(planned, name) for name in REPORTED} == {name: getattr(ready, name) for name in REPORTED}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_a_dry_run_reports_what_a_start_reports(name: str, kind: Any, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    assert_same_report(
        EngineConfig(model=str(folder), dtype=kind, num_threads=1, num_gpu_blocks_override=50, max_model_len=24)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"dtype": "auto"},
        {"kv_cache_memory_bytes": 1_000_000, "block_size": 32},
        {"swap_space": 0.01, "max_model_len": 100, "max_num_seqs": 3},
        {"load_format": "dummy"},
        {"num_gpu_blocks_override": 3},
        {"gpu_memory_utilization": 0.9},
    ],
    ids=str,
)
def test_flags_affect_the_dry_run_as_the_start(
    folder: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "_BUDGET_S", 0.001)
    monkeypatch.setattr(dtype, "_BEYOND_CACHE_BYTES", 1 << 12)
    assert_same_report(EngineConfig(**{"model": str(folder), "dtype": "float32", "num_threads": 1, **flags}))


def test_a_dry_run_counts_a_draft_model_as_the_start_does(folder: Path, tmp_path: Path) -> None:
    draft = make_tiny("qwen3", tmp_path)
    speculation = SpeculativeConfig(num_speculative_tokens=2, method="draft_model", model=str(draft))
    sizes = {"kv_cache_memory_bytes": 1_000_000, "swap_space": 0.01, "num_threads": 1}
    assert_same_report(EngineConfig(model=str(folder), dtype="bfloat16", speculative_config=speculation, **sizes))


def test_a_dry_run_fails_as_the_start_fails(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), dtype="float32", num_threads=1, num_gpu_blocks_override=2, max_model_len=64
    )
    errors = []
    for start in (plan_capacity, load):
        with pytest.raises(StartupError) as refused:
            start(config)
        errors.append(str(refused.value))
    assert errors[0] == errors[1]


def test_derived_numbers_are_right(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), dtype="float32", num_threads=1, num_gpu_blocks_override=20, max_model_len=128
    )
    planned = plan_capacity(config)
    layers, kv_heads, head_dim = 4, 2, 16
    assert planned.kv_bytes_per_token >= layers * 2 * kv_heads * head_dim * 4
    assert planned.kv_tokens == 320
    assert planned.full_length_requests == 2.5
    assert planned.file_bytes == (folder / "model.safetensors").stat().st_size
