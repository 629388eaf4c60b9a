"""Calls to a running engine core besides requests: listing its sequences and resetting its cache."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest
from octavo_engine.offline.llm import LLM
from octavo_engine.process.client import CoreProcess
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import EngineDead
from octavo_testing.core_process import collect, running
from octavo_testing.scripted import LOADER, scripted, write_byte_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_PROMPT = "x" * 64


@pytest.fixture(scope="module")
def config(tmp_path_factory, scripted_tmp):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(folder), load_format="dummy", max_model_len=512, max_num_seqs=2)


async def test_an_idle_core_reports_no_sequences(llm):
    assert await llm.debug_requests() == []


async def test_sequences_are_reported_with_the_callers_ids(llm, gate):
    """The core handles messages in order, and the first request runs for long, so answers may take a while."""
    unending = scripted("a", eos=False, max_tokens=400, extra_args=gate.wait_at(3))
    async with (
        aclosing(llm.generate(LONG_PROMPT, unending, "first")) as first,
        aclosing(llm.generate("second", scripted("x", n=2), "second")) as second,
    ):
        await anext(first)
        reading = asyncio.create_task(anext(second))
        await asyncio.sleep(0)
        asking = asyncio.create_task(llm.debug_requests())
        await asyncio.sleep(0)
        gate.open()
        states = {info.request_id: info for info in await asking}
        assert {name: info.state for name, info in states.items()} == {"first": "running", "second": "waiting"}
        assert states["second"].waiting_reason is not None
        await first.aclose()
        await reading
        async for _ in second:
            pass
    assert await llm.debug_requests() == []


async def test_the_prefix_cache_is_reset_only_while_no_block_is_in_use(llm, gate):
    prompt = "y" * 64
    await collect(llm, prompt, scripted("a"), "warm")
    (again,) = await collect(llm, prompt, scripted("a"), "again", kind="final")
    assert again.num_cached_tokens > 0
    async with aclosing(llm.generate(prompt, scripted("a" * 150, extra_args=gate.wait_at(1)), "busy")) as busy:
        await anext(busy)
        resetting = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0)
        gate.open()
        assert await resetting is False
        async for _ in busy:
            pass
    assert await llm.reset_prefix_cache() is True
    (cold,) = await collect(llm, prompt, scripted("a"), "cold", kind="final")
    assert cold.num_cached_tokens == 0


async def test_a_core_that_does_not_answer_is_an_error(config):
    core = await CoreProcess.launch(config, LOADER)
    await core.ready()
    try:
        os.kill(core.pid, signal.SIGSTOP)
        with pytest.raises(EngineDead, match=r"not answered within 0\.05 s"):
            await core.call("debug_requests", timeout_s=0.05)
    finally:
        os.kill(core.pid, signal.SIGCONT)
        await core.stop()


async def test_a_call_ends_when_the_core_dies(config):
    async with running(config) as llm:
        os.kill(llm._core.pid, signal.SIGSTOP)
        asking = asyncio.create_task(llm.debug_requests())
        await asyncio.sleep(0)
        os.kill(llm._core.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="signal 9"):
            await asking
        with pytest.raises(EngineDead):
            await llm.reset_prefix_cache()


async def test_offline_calls_work(config):
    llm = LLM(config.model, loader=LOADER, load_format="dummy", max_model_len=512)
    try:
        for cached in (0, 48):
            (output,) = llm.generate(["z" * 49], scripted("a"), use_tqdm=False)
            assert output.num_cached_tokens == cached
        assert llm.reset_prefix_cache() is True
        (output,) = llm.generate(["z" * 49], scripted("a"), use_tqdm=False)
        assert output.num_cached_tokens == 0
    finally:
        llm.shutdown()
