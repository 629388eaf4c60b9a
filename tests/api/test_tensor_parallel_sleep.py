"""Sleep of an engine of two ranks: the memory of both returns to the system, and answers after waking are the same."""

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.runner.capacity import plan_capacity
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import EngineDead, Unavailable
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.core_process import collect, processes_of, running
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHARE = 0.8  # of the released bytes by which the resident memory must fall: the allocator keeps some pages
SOON_S = 2.0


async def greedy(llm: AsyncLLM, num_tokens: int = 3) -> list[int]:
    prompt = {"prompt_token_ids": [i % 200 + 10 for i in range(num_tokens)]}
    (output,) = await collect(llm, prompt, GREEDY, kind="final")
    return list(output.outputs[0].token_ids)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(make_tiny("llama", tmp_path)),
        dtype="float32",
        num_threads=2,
        tensor_parallel_size=2,
        num_gpu_blocks_override=20,
        enable_sleep_mode=True,
    )


@pytest.mark.real_model
async def test_memory_of_all_ranks_returns_to_the_system_and_answers_stay() -> None:
    config = EngineConfig(
        dtype="float32",
        num_threads=2,
        tensor_parallel_size=2,
        max_model_len=1024,
        num_gpu_blocks_override=64,
        max_step_ms=0.0,
        enable_sleep_mode=True,
    )
    plan = plan_capacity(config)
    async with running(config, DEFAULT_LOADER) as llm:
        processes = processes_of(llm)
        before = await greedy(llm)
        for level in (1, 2):
            await greedy(llm, 1000)
            awake = [process.memory_info().rss for process in processes]
            await llm.sleep(level)
            for rank, process in enumerate(processes):
                released = plan.rank_kv_bytes[rank] + (plan.rank_weights_bytes[rank] if level == 2 else 0)
                assert awake[rank] - process.memory_info().rss > SHARE * released, rank
            await llm.wake_up()
            assert await greedy(llm) == before


async def test_a_failed_reload_can_be_repeated(config: EngineConfig, tmp_path: Path) -> None:
    (file,) = Path(config.model).glob("*.safetensors")
    async with running(config, DEFAULT_LOADER) as llm:
        before = await greedy(llm)
        await llm.sleep(2)
        file.rename(tmp_path / "moved")
        with pytest.raises(Unavailable, match="could not be restored"):
            await llm.wake_up()
        assert llm.sleeping_tags == {"weights", "kv_cache"}
        (tmp_path / "moved").rename(file)
        await llm.wake_up()
        assert await greedy(llm) == before


async def test_a_rank_that_is_killed_while_it_sleeps_ends_the_engine(config: EngineConfig) -> None:
    llm = await AsyncLLM.start(config, loader=DEFAULT_LOADER)
    try:
        core, rank = processes_of(llm)
        await llm.sleep(2)
        killed_s = time.monotonic()
        rank.send_signal(signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, [core], timeout=60)
        assert time.monotonic() - killed_s <= SOON_S
        with pytest.raises(EngineDead, match="rank 1"):
            await llm.wake_up()
    finally:
        await llm.shutdown()
