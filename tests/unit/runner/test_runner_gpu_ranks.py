"""Ranks on the GPUs of one host: each has its own, and the one with the least memory decides the number of blocks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo_engine.devices import device
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.devices.device import open_device
from octavo_engine.devices.memory import GIB
from octavo_engine.devices.step_inputs import StepLimits
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.runner.rank_plans import divide_threads, plan_ranks
from octavo_engine.settings.config import EngineConfig, steps_ahead
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import make_tiny


class DryGpu(CudaDevice):
    """A GPU whose KV cache has the sizes of the CPU's."""

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return CpuBackend(specs, block_size, dtype)


def see_gpus(patch: pytest.MonkeyPatch, free_gib: list[int]) -> None:
    """Let torch find GPUs of 80 GiB."""
    patch.setattr(torch.cuda, "device_count", lambda: len(free_gib))
    patch.setattr(torch.cuda, "mem_get_info", lambda index: (free_gib[index] * GIB, 80 * GIB))
    patch.setattr(torch.distributed, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(("visible", "found"), [(1, "1 is visible"), (3, "3 are visible")])
def test_each_rank_needs_a_gpu(visible: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, [79] * visible)
    config = EngineConfig(tensor_parallel_size=4, num_threads=64)
    with pytest.raises(StartupError, match=rf"^--tensor-parallel-size 4 needs a GPU .*{found}.*use at most {visible},"):
        divide_threads(config, CudaDevice())


def test_ranks_of_several_hosts_need_a_gpu_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, [79])
    config = EngineConfig(tensor_parallel_size=4, nnodes=2, num_threads=64)
    with pytest.raises(StartupError, match=r"size 4 needs .*, 2 on each host, but 1 .*at most 2, or"):
        divide_threads(config, CudaDevice())


def test_ranks_on_gpus_need_nccl_and_divide_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, [79, 79])
    config = EngineConfig(tensor_parallel_size=2, num_threads=5)
    assert divide_threads(config, CudaDevice()).num_threads == 2
    assert divide_threads(replace(config, num_threads=1), CudaDevice()).num_threads == 1
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(StartupError, match=r"needs torch with NCCL.*use 1"):
        divide_threads(config, CudaDevice())


def test_the_gpu_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, [70, 40, 79])
    memory = CudaDevice().memory(3)
    assert (memory.total_bytes, memory.available_bytes, memory.utilization) == (80 * GIB, 40 * GIB, 0.9)
    assert CudaDevice(2).memory().available_bytes == 79 * GIB
    one = CudaDevice().memory()
    assert memory.host_available_bytes == pytest.approx((one.host_available_bytes or 0) // 3, rel=0.2)


def test_each_rank_plans_its_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    see_gpus(monkeypatch, [79, 40])
    folder = make_tiny("llama", tmp_path)
    model = load_model_config(resolve_model(str(folder)))
    config = EngineConfig(model=str(folder), device="auto", tensor_parallel_size=2, num_threads=1)
    plans = plan_ranks(config, DryGpu(), model)
    assert plans.config.device == "cuda", "another rank must not choose the CPU"
    assert plans.ranks[0].memory.available_bytes == 40 * GIB
    first, second = plans.ranks
    assert first.kv.num_blocks == second.kv.num_blocks
    alone = replace(plans.config, tensor_parallel_size=1, enforce_eager=True)  # ranks have no graphs
    one = plan_memory(alone, DryGpu(), model)
    assert first.model.reserve_bytes == one.model.reserve_bytes + GIB
    assert first.model.bytes_per_block == one.model.bytes_per_block // 2


def test_a_rank_opens_and_examines_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[int] = []

    def no_problem(index: int) -> None:
        examined.append(index)

    monkeypatch.setattr(device, "find_cuda_problem", no_problem)
    opened = open_device("cuda", 3)
    assert examined == [3]
    assert opened.torch_device == opened.group_gpu == torch.device("cuda", 3)
    assert open_device("cpu", 3).group_gpu is None


def test_steps_of_several_ranks_run_without_graphs_and_none_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda chosen: None)
    gpu, config = CudaDevice(1), EngineConfig(tensor_parallel_size=2)
    gpu.prepare(config)
    model: Any = SimpleNamespace(waiting_operator=None, forward=None)
    limits = StepLimits(max_num_seqs=4, max_model_len=64, table_width=4)
    assert gpu.step_graphs(model, limits) is None
    assert steps_ahead(config, "cuda") == 0
    assert steps_ahead(EngineConfig(), "cuda") == 1
