"""A rank that ends, ends the engine with an error that names it; no process outlives the engine core."""

import asyncio
import os
import queue
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from octavo_engine.devices.device import CpuDevice
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.process.rank_messages import RunPlan
from octavo_engine.process.rank_processes import RankProcesses
from octavo_engine.runner.rank_plans import RankPlans, plan_ranks
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import EngineDead, GroupBroken, StartupError
from octavo_engine.wire.plan import SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.core_process import collect, processes_of, running, scripted_environment
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow
#: Seconds within which a lost rank must have ended the engine.
SOON_S = 2.0
TIMEOUT_S = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_tiny("llama", tmp_path_factory.mktemp("model"))
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        num_threads=3,
        tensor_parallel_size=2,
        num_gpu_blocks_override=64,
        max_model_len=128,
    )


async def consume(llm: AsyncLLM, request_id: str, started: asyncio.Event) -> None:
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    while True:
        async for _ in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, request_id):
            started.set()


def three_ranks(config: EngineConfig) -> tuple[ModelFiles, RankPlans]:
    """Return the files of a model with enough KV heads, whose weights have another shape, and plans of its ranks."""
    files = resolve_model(config.model)
    files = replace(files, config=files.config | {"num_key_value_heads": 4})
    config = replace(config, tensor_parallel_size=3, num_threads=1)
    return files, plan_ranks(config, CpuDevice(), load_model_config(files))


def start(ranks: RankProcesses, files: ModelFiles, plans: RankPlans) -> None:
    ranks.launch(plans.config, files, plans.hosts[0])
    ranks.start(files, plans)


async def end(streams: list[asyncio.Task[None]]) -> None:
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.parametrize("state", ["busy", "idle"])
async def test_a_killed_rank_ends_the_engine(config: EngineConfig, state: str) -> None:
    llm = await AsyncLLM.start(config, loader=DEFAULT_LOADER)
    try:
        core, rank = processes_of(llm)
        streams = []
        if state == "busy":
            running_events = [asyncio.Event() for _ in range(2)]
            streams = [asyncio.create_task(consume(llm, f"r{i}", event)) for i, event in enumerate(running_events)]
            await asyncio.gather(*(event.wait() for event in running_events))
        killed_s = time.monotonic()
        rank.send_signal(signal.SIGKILL)
        errors = await asyncio.gather(*streams, return_exceptions=True)
        await asyncio.to_thread(psutil.wait_procs, [core], timeout=60)
        assert time.monotonic() - killed_s <= SOON_S
        assert not core.is_running()
        assert all(isinstance(error, EngineDead) for error in errors)
        assert "rank 1 failed: its process was killed by signal 9" in str(llm.dead_error)
    finally:
        await llm.shutdown()


@pytest.mark.parametrize("state", ["busy", "idle"])
async def test_a_rank_that_stands_still_ends_the_engine_after_the_timeout(config: EngineConfig, state: str) -> None:
    llm = await AsyncLLM.start(replace(config, distributed_timeout_seconds=TIMEOUT_S), loader=DEFAULT_LOADER)
    try:
        core, rank = processes_of(llm)
        events = [asyncio.Event() for _ in range(2)]
        streams = [asyncio.create_task(consume(llm, f"r{i}", event)) for i, event in enumerate(events)]
        await asyncio.gather(*(event.wait() for event in events))
        if state == "idle":
            await end(streams)
            await asyncio.wait_for(collect(llm, {"prompt_token_ids": [5]}, SamplingParams(max_tokens=1)), 60)
        rank.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        if state == "idle":
            streams = [asyncio.create_task(consume(llm, f"s{i}", asyncio.Event())) for i in range(2)]
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert TIMEOUT_S - 1 <= time.monotonic() - stopped_s <= TIMEOUT_S + SOON_S
        assert [type(error) for error in errors] == [EngineDead] * 2
        assert "rank 1 did not answer within 3 s (--distributed-timeout-seconds)" in str(llm.dead_error)
        _, alive = await asyncio.to_thread(psutil.wait_procs, [core, rank], timeout=60)
        assert not alive
    finally:
        await llm.shutdown()


async def test_a_rank_that_stands_still_ends_an_engine_that_loads_an_adapter(
    config: EngineConfig, tmp_path: Path
) -> None:
    config = replace(config, distributed_timeout_seconds=TIMEOUT_S, enable_lora=True)
    llm = await AsyncLLM.start(config, loader=DEFAULT_LOADER)
    try:
        core, rank = processes_of(llm)
        rank.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineDead):
            await llm.load_adapter("name", str(write_adapter(tmp_path, llama_pairs())))
        assert "rank 1 did not answer within 3 s (--distributed-timeout-seconds)" in str(llm.dead_error)
        _, alive = await asyncio.to_thread(psutil.wait_procs, [core, rank], timeout=60)
        assert not alive
    finally:
        await llm.shutdown()


async def test_no_process_outlives_a_killed_core(config: EngineConfig) -> None:
    llm = await AsyncLLM.start(config, loader=DEFAULT_LOADER)
    try:
        core, rank = processes_of(llm)
        core.send_signal(signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, [core, rank], timeout=60)
        assert not alive
    finally:
        await llm.shutdown()


async def test_ranks_listen_on_the_loopback_interface_only_and_leave_no_files(config: EngineConfig) -> None:
    with scripted_environment() as folder:
        async with running(config, DEFAULT_LOADER) as llm:
            processes = processes_of(llm)
            listening = [
                each.laddr.ip
                for process in processes
                for each in process.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            ]
            assert listening
            used_s = sum(sum(process.cpu_times()[:2]) for process in processes)
            assert llm.core_cpu_s() >= used_s - 0.1  # both round to clock ticks
            assert set(listening) <= {"127.0.0.1", "::1"}
            assert not list(folder.glob("octavo-*"))
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


async def test_the_error_of_a_rank_that_cannot_start_names_it(config: EngineConfig) -> None:
    """The files that rank 0 has found are gone when the other rank reads them."""
    files = resolve_model(config.model)
    files = replace(files, weight_files=(Path("/nowhere/model.safetensors"),))
    plans = plan_ranks(config, CpuDevice(), load_model_config(files))
    ranks = RankProcesses(2, 60)
    try:
        start(ranks, files, plans)
        with pytest.raises(StartupError, match=r"^rank 1: .*/nowhere/model\.safetensors"):
            ranks.wait_ready()
    finally:
        ranks.stop()


async def test_a_rank_that_ends_while_others_load_is_reported_at_once(config: EngineConfig, tmp_path: Path) -> None:
    """Both ranks read a pipe that has no writer."""
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    files, plans = three_ranks(config)
    ranks = RankProcesses(3, 60)
    try:
        start(ranks, replace(files, weight_files=(pipe,)), plans)
        ranks.check()
        _, last = psutil.Process().children()
        last.kill()
        with pytest.raises(StartupError, match=r"^rank 2: its process was killed by signal 9"):
            ranks.wait_ready()
        with pytest.raises(StartupError, match=r"^rank 2: its process was killed by signal 9"):
            ranks.check()
    finally:
        ranks.stop()


@pytest.mark.parametrize("late", [0, 1])
async def test_the_late_rank_is_found_among_those_that_wait_for_a_plan(config: EngineConfig, late: int) -> None:
    """Rank 1 stands still and rank 2 waits for a plan; or both wait for one, as rank 0 has stood still."""
    files, plans = three_ranks(config)
    ranks = RankProcesses(3, TIMEOUT_S)
    try:
        start(ranks, replace(files, load_format="dummy"), plans)
        ranks.wait_ready()
        if late == 1:
            psutil.Process().children()[0].suspend()
        found = str(await asyncio.to_thread(ranks.find_cause, GroupBroken("rank 0 of 3: the gather failed.")))
        assert "rank 1 did not answer within 3 s" in found if late == 1 else "rank 0 may have stood still" in found
    finally:
        ranks.stop()
    assert not psutil.Process().children()


async def test_an_error_in_a_step_of_a_rank_names_it_and_the_cause(config: EngineConfig) -> None:
    """A plan that only the other rank gets names a sequence that it does not hold."""
    files = resolve_model(config.model)
    lost: queue.SimpleQueue[EngineDead] = queue.SimpleQueue()
    ranks = RankProcesses(2, 60)
    try:
        start(ranks, files, plan_ranks(config, CpuDevice(), load_model_config(files)))
        assert ranks.wait_ready() > 0
        ranks.on_lost(lost.put)
        ranks.send(RunPlan(StepPlan(step_id=1, seqs=[SeqStep(seq_id=7, start=0, num_tokens=1, sample=True)])))
        assert (
            str(await asyncio.to_thread(lost.get, timeout=60))
            == "rank 1 failed: rank 1 of 2: a step failed: KeyError: 7"
        )
    finally:
        ranks.stop()
