"""Each rank runs on its own part of the CPUs that a variable names."""

import os
from pathlib import Path

import pytest
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.process.parallel_executor import load_executor
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.core_process import collect, processes_of, running
from octavo_testing.tiny_models import make_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPUs are needed"),
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    return EngineConfig(
        model=str(make_tiny("llama", tmp_path)),
        dtype="float32",
        tensor_parallel_size=2,
        num_gpu_blocks_override=20,
        max_model_len=64,
    )


async def test_each_rank_is_bound_to_its_part(config: EngineConfig) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    async with running(config, DEFAULT_LOADER) as llm:
        await collect(llm, {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2), kind="final")
        core, rank = processes_of(llm)
        assert (core.cpu_affinity(), rank.cpu_affinity()) == ([first], [second])


def test_a_script_is_bound_until_its_engine_ends(config: EngineConfig) -> None:
    allowed = os.sched_getaffinity(0)
    executor, _ = load_executor(config)
    assert os.sched_getaffinity(0) == {min(allowed)}
    executor.shutdown()
    assert os.sched_getaffinity(0) == allowed
