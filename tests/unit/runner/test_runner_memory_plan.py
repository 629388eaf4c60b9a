"""`--dtype auto` chooses bf16 if float32 does not fit into the memory of the machine or container."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, PROCESS_BYTES, MemoryInfo
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_testing.tiny_models import make_tiny

KV_BYTES = 1 << 20


class LimitedDevice(CpuDevice):
    """A CPU in a container that multiplies float32 faster."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes

    def default_dtype(self, model: Any) -> torch.dtype:
        return torch.float32

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return MemoryInfo(total_bytes=self.total_bytes, available_bytes=1 << 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


def plan(folder: Path, total_bytes: int, **flags: Any) -> MemoryPlan:
    config = EngineConfig(**{"model": str(folder), "dtype": "auto", "kv_cache_memory_bytes": KV_BYTES, **flags})
    return plan_memory(config, LimitedDevice(total_bytes), load_model_config(resolve_model(str(folder))))


def test_float32_is_chosen_where_it_fits(folder: Path) -> None:
    assert plan(folder, GIB).dtype == torch.float32


def test_bfloat16_is_chosen_where_float32_does_not_fit(folder: Path) -> None:
    assert plan(folder, PROCESS_BYTES + KV_BYTES).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "flags", [{"kv_cache_memory_bytes": GIB}, {"swap_space": 1.0}, {"num_gpu_blocks_override": 1_000_000}], ids=str
)
def test_cache_and_swap_space_count(folder: Path, flags: dict[str, Any]) -> None:
    assert plan(folder, GIB, **flags).dtype == torch.bfloat16


def test_a_requested_type_is_used(folder: Path) -> None:
    assert plan(folder, PROCESS_BYTES, dtype="float32").dtype == torch.float32


def test_the_length_is_the_models_the_users_or_what_fits(folder: Path) -> None:
    assert plan(folder, GIB).max_model_len == 128
    assert plan(folder, GIB, max_model_len=50).max_model_len == 50
    assert plan(folder, GIB, num_gpu_blocks_override=7).max_model_len == 112


def test_a_share_beyond_the_free_memory_is_cut_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags: dict[str, Any] = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 1.0}
    assert plan(folder, 1 << 39, **flags).kv.num_blocks == 1 << 16
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    plan(folder, 1 << 42, **flags)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]
    assert "1024.00 GiB of 4096.00 GiB" in caplog.text
