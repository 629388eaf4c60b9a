"""The steps that a device runs before the engine is ready, on the CPU's runner, and a start without enough memory."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from octavo_engine import LLM
from octavo_engine.devices import device as device_module
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import MemoryInfo
from octavo_engine.runner import load as load_module
from octavo_engine.runner import model_loading
from octavo_engine.runner.load import load, warm_up_plans
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.runner.runner import Runner
from octavo_engine.settings.config import EngineConfig, most_seqs
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import StepPlan
from octavo_testing.failing_start import compilation_error
from octavo_testing.tiny_models import make_tiny
from triton.runtime.errors import OutOfResources

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(folder), "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 20, **fields}
    )


def planned(config: EngineConfig) -> MemoryPlan:
    return plan_memory(config, CpuDevice(), load_model_config(resolve_model(config.model)))


class LateCpu(CpuDevice):
    """A CPU whose kernels are said to compile late."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.compiles_late = True

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return MemoryInfo(total_bytes=80 * GIB, available_bytes=79 * GIB, utilization=0.9)


LIMITS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    {"max_num_batched_tokens": 8192, "max_num_seqs": 256},
    {"max_num_batched_tokens": 3, "max_num_seqs": 8},
    {"max_num_seqs": 1, "num_gpu_blocks_override": 8},
    {"max_model_len": 1, "num_gpu_blocks_override": 1},
    {"max_model_len": 2, "num_gpu_blocks_override": 1, "max_num_seqs": 1},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_warm_up_keeps_within_the_limits(folder: Path, limits: dict[str, Any]) -> None:
    chosen = config(folder, **limits)
    memory = planned(chosen)
    most = chosen.max_num_batched_tokens or 2048
    plans = warm_up_plans(chosen, memory, num_tokens=most)
    for plan in plans:
        assert plan.num_tokens <= most
        assert len(plan.seqs) <= most_seqs(chosen)
        for step in plan.seqs:
            assert step.start + step.num_tokens <= memory.max_model_len
            assert all(0 <= block < memory.kv.num_blocks for table in step.block_ids for block in table)
    assert plans[0].num_tokens == min(most, memory.max_model_len)
    assert plans[-1].dropped_seqs == sorted({s.seq_id for s in plans[1].seqs})


def test_warm_up_runs_each_kind_of_step(folder: Path) -> None:
    chosen = config(folder, max_num_seqs=4, max_num_batched_tokens=64)
    plans = warm_up_plans(chosen, planned(chosen), num_tokens=64)
    kinds = [{step.num_tokens > 1 for step in plan.seqs} for plan in plans]
    assert kinds == [{True}, {True}, {False}, {True, False}, set()]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_an_engine_that_compiles_late_warms_up(
    folder: Path, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[StepPlan] = []
    run = Runner._start

    def recorded(self: Runner, plan: StepPlan) -> Any:
        ran.append(plan)
        return run(self, plan)

    monkeypatch.setattr(Runner, "_start", recorded)
    monkeypatch.setattr(device_module, "CpuDevice", LateCpu)
    executor, _ = load(config(folder, device="cpu", **limits))
    assert ran[-1].dropped_seqs
    executor.shutdown()


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({}, r"--kv-cache-memory-bytes from 1048576 to 996147"),
        ({"kv_cache_memory_bytes": None}, r"--gpu-memory-utilization from 0\.9 to 0\.85"),
        ({"num_gpu_blocks_override": 100}, "--num-gpu-blocks-override from 100 to 95"),
    ],
    ids=str,
)
def test_memory_that_runs_out_at_the_start_names_the_flag(
    folder: Path, sizes: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: Runner, plans: list[StepPlan]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Runner, "warm_up", no_memory)
    monkeypatch.setattr(device_module, "CpuDevice", LateCpu)
    fields = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, **sizes}
    if fields["kv_cache_memory_bytes"] is None:
        monkeypatch.setattr(LateCpu, "attention_backend", lambda *_: NoCache())
    with pytest.raises(StartupError, match=remedy) as raised:
        load(config(folder, device="cpu", **fields))
    assert raised.value.code == "OutOfMemory"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (AssertionError(), r"AssertionError at runner\.py:\d+\): AssertionError\."),
        (OutOfResources(270336, 101376, "shared memory"), "OutOfResources.* Required: 270336, Hardware limit: 101376"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore"), "no kernel image"),
        (compilation_error(), r"CompilationError at runner\.py:\d+\): Cannot make_shape_compatible\."),
    ],
    ids=["assertion", "out of resources", "no kernel image", "compile error"],
)
@pytest.mark.parametrize("start", ["executor", "LLM"])
def test_a_first_step_that_fails_is_one_line_with_a_remedy(
    folder: Path, error: Exception, cause: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Runner, plan: StepPlan) -> None:
        raise error

    monkeypatch.setattr(Runner, "_start", fail)
    monkeypatch.setattr(device_module, "CpuDevice", LateCpu)
    starts: dict[str, Callable[[], object]] = {
        "LLM": lambda: LLM(str(folder), dtype="float32", num_gpu_blocks_override=20, device="cpu"),
        "executor": lambda: load(config(folder, device="cpu")),
    }
    with pytest.raises(StartupError, match=cause) as raised:
        starts[start]()
    assert "\n" not in str(raised.value)
    assert "--device cpu" in str(raised.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (load_module, "plan_ranks"),
        (model_loading, "load_model"),
        (model_loading, "weights_fingerprint"),
        (load_module, "load_adapters"),
        (load_module, "make_runner"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_each_part_of_a_start_fails_with_one_line(
    folder: Path, module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore") from OSError("the cause\nmore")

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(RuntimeError, match="launch failure"):
        load(config(folder, device="cpu"))
    monkeypatch.setattr(device_module, "CpuDevice", LateCpu)
    place = rf"RuntimeError at {module.__name__.rpartition('.')[2]}\.py:\d+\): the cause\. Remedy"
    with pytest.raises(StartupError, match=place) as raised:
        load(config(folder, device="cpu"))
    assert "\n" not in str(raised.value)


class NoCache:
    """A KV cache that takes no memory."""

    def allocate(self, num_blocks: int) -> None: ...

    def bytes_per_block(self) -> int:
        return 1 << 20
