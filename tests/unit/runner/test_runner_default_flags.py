"""Default flags serve the models that users try first: on 24 GiB each of them starts, by the path of `--dry-run`."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, MemoryInfo
from octavo_engine.layers import linear_method
from octavo_engine.runner.capacity import Capacity, capacity_of
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.model_shapes import MODEL_CONFIGS, write_shapes

#: Name -> the weights in GiB, and the shortest length that the default flags may choose on 24 GiB.
MODELS = {
    "Qwen3-0.6B": (1.4, 40_960),
    "Qwen3-1.7B": (3.8, 40_960),
    "Qwen3-4B": (8.2, 28_672),
    "Qwen3-8B": (15.3, 28_672),
    "Llama-3.2-1B": (2.8, 131_072),
    "Llama-3.2-3B": (6.8, 38_912),
    "Llama-3.1-8B": (15.0, 32_768),
    "Phi-4-mini": (8.3, 32_768),
    "Gemma-3-1B": (2.5, 32_768),
    "Gemma-3-4B": (8.5, 30_720),
}


class Machine(CpuDevice):
    """A CPU with an injected amount of memory that multiplies `dtype` faster."""

    def __init__(self, *, total_gib: float = 24, free_gib: float = 24, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self._memory = MemoryInfo(total_bytes=int(total_gib * GIB), available_bytes=int(free_gib * GIB))
        self._dtype = dtype

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return self._memory

    def default_dtype(self, model: Any) -> torch.dtype:
        return self._dtype


@pytest.fixture(autouse=True)
def _one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack each weight in one layout, as most CPUs do: without kernels there are none, on some ARM CPUs two."""
    monkeypatch.setattr(linear_method, "num_layouts", lambda dtype, *, wide=False: 1)
    monkeypatch.delenv("OCTAVO_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def dry_run(name: str, folder: Path, machine: Machine, **flags: Any) -> Capacity:
    config = EngineConfig(model=str(write_shapes(name, folder)), load_format="dummy", **flags)
    return capacity_of(config, machine, resolve_model(config.model, load_format="dummy"))


def test_every_model_has_its_expectation() -> None:
    assert MODELS.keys() == MODEL_CONFIGS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_default_flags_start_on_24_gib(name: str, tmp_path: Path) -> None:
    weights_gib, length = MODELS[name]
    capacity = dry_run(name, tmp_path, Machine())
    assert capacity.weights_bytes / GIB == pytest.approx(weights_gib, abs=0.1)
    assert length <= capacity.max_model_len <= capacity.context_length
    assert capacity.full_length_requests >= 1
    assert capacity.weights_bytes + capacity.kv_bytes < 22 * GIB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name, (weights_gib, _) in MODELS.items() if weights_gib < 7])
def test_half_of_the_memory_is_enough_for_small_models(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    capacity = dry_run(name, tmp_path, Machine(free_gib=11.8, dtype=dtype))
    assert capacity.full_length_requests >= 1
    assert capacity.weights_bytes + capacity.kv_bytes <= 11.8 * GIB


@pytest.mark.parametrize("name", [name for name, (weights_gib, _) in MODELS.items() if weights_gib > 7])
def test_large_models_name_the_figure_that_does_not_fit(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"only 11\.80 GiB of 24\.00 GiB of memory are available") as refused:
        dry_run(name, tmp_path, Machine(free_gib=11.8))
    assert refused.value.code == "OutOfMemory"


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.2-3B", "Qwen3-8B"])
def test_the_length_depends_on_the_limit_and_not_on_free_memory(name: str, tmp_path: Path) -> None:
    lengths = {dry_run(name, tmp_path, Machine(free_gib=free_gib)).max_model_len for free_gib in (20, 22, 24)}
    assert len(lengths) == 1
    slightly_less = dry_run(name, tmp_path, Machine(total_gib=23.99, free_gib=22))
    assert {slightly_less.max_model_len} == lengths


def test_the_chosen_length_is_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo_engine"):
        dry_run("Llama-3.2-3B", tmp_path, Machine())
    lines = [record.message for record in caplog.records if "max_model_len" in record.message]
    assert len(lines) == 1
    for figure in ("38912", "131072", "24.00 GiB", "6.74 GiB", "112.0 KiB", "--max-model-len"):
        assert figure in lines[0]


def test_too_little_free_memory_for_the_chosen_length_names_figure_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refused:
        dry_run("Llama-3.2-3B", tmp_path, Machine(free_gib=10))
    for part in ("6.74 GiB", "38912 tokens", "4.16 GiB", "only 10.00 GiB of 24.00 GiB", "--max-model-len to at most"):
        assert part in str(refused.value)
    shorter = dry_run("Llama-3.2-3B", tmp_path, Machine(free_gib=10), max_model_len=30_000)
    assert shorter.full_length_requests >= 1


def test_weights_beyond_the_limit_are_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"of 15\.00 GiB of memory.*15\.28 GiB.*0\.0 MiB of the rest"):
        dry_run("Qwen3-8B", tmp_path, Machine(total_gib=15, free_gib=15))


def test_the_share_of_memory_is_the_users_if_given(tmp_path: Path) -> None:
    low, high = (
        dry_run("Qwen3-4B", tmp_path, Machine(), gpu_memory_utilization=share, max_model_len=1024)
        for share in (0.5, 0.9)
    )
    assert low.kv_bytes == pytest.approx(12 * GIB - low.weights_bytes - (384 << 20), rel=0.01)
    assert high.kv_bytes == pytest.approx(21.6 * GIB - high.weights_bytes - (384 << 20), rel=0.01)
    whole = dry_run("Qwen3-4B", tmp_path, Machine(), gpu_memory_utilization=0.9)
    assert whole.max_model_len == whole.context_length
    with pytest.raises(StartupError, match=r"--gpu-memory-utilization 0\.3"):
        dry_run("Qwen3-4B", tmp_path, Machine(), gpu_memory_utilization=0.3)
    busy = dry_run("Qwen3-4B", tmp_path, Machine(free_gib=16), gpu_memory_utilization=0.9)
    assert busy.max_model_len == busy.context_length
    assert busy.weights_bytes + busy.kv_bytes < 16 * GIB


@pytest.mark.parametrize(("total_gib", "dtype"), [(96, "float32"), (64, "bfloat16"), (24, "bfloat16")])
def test_dtype_auto_never_chooses_a_type_that_does_not_fit(total_gib: float, dtype: str, tmp_path: Path) -> None:
    machine = Machine(total_gib=total_gib, free_gib=total_gib, dtype=torch.float32)
    assert dry_run("Qwen3-8B", tmp_path, machine).dtype == dtype
