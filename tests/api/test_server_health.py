"""`/health` of a real engine core process that hangs, and of one without work."""

import asyncio
import errno
import os
import signal
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.scripted import scripted, write_byte_model
from octavo_testing.server import ScriptedClient, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path):
    with scripted_environment():
        yield EngineConfig(model=str(write_byte_model(tmp_path)), load_format="dummy", max_model_len=512)


@asynccontextmanager
async def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def health(served, status):
    """Send requests as a probe does, until the response is `status`."""
    while (answer := await served.http.get("/health")).status_code != status:
        await asyncio.sleep(0.05)
    return answer


async def test_a_hung_core_is_detected_without_work_and_may_recover(config):
    async with running(config) as llm, serving(llm, health_stall_timeout=1.0) as served:
        async with stopped(llm._core.pid):
            answer = await health(served, 503)
            assert "unfinished requests: 0;" in answer.json()["reason"]
        await health(served, 200)


async def test_a_hung_core_is_detected_although_its_clients_leave_early(config):
    limit_s, leave_after_s = 4.0, 3.0
    clock = asyncio.get_running_loop().time

    async def leave_early(served):
        while True:
            with suppress(httpx.ReadTimeout):
                await served.http.post("/v1/completions", json={"prompt": "hi"}, timeout=leave_after_s)

    async with running(config) as llm, serving(llm, health_stall_timeout=limit_s) as served, stopped(llm._core.pid):
        began_s, leaving = clock(), asyncio.create_task(leave_early(served))
        await health(served, 503)
        assert clock() - began_s < 2 * limit_s
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


async def test_a_hung_core_is_detected_with_work_and_may_recover(config):
    async with (
        running(config) as llm,
        serving(llm, health_stall_timeout=1.0) as served,
        stopped(llm._core.pid),
        aclosing(llm.generate("hi", scripted("abc"), "r")) as outputs,
    ):
        reading = asyncio.create_task(anext(outputs))
        answer = await health(served, 503)
        assert "unfinished requests: 1;" in answer.json()["reason"]
        assert (await served.http.get("/ping")).status_code == 503
        os.kill(llm._core.pid, signal.SIGCONT)
        await reading
        await health(served, 200)


async def test_the_cores_cpu_time_is_known_until_it_exits(config, monkeypatch):
    async with running(config) as llm:
        assert (used_s := llm.core_cpu_s()) > 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, "glob", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
            assert llm.core_cpu_s() == used_s
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
            assert llm.core_cpu_s() == used_s
    assert llm.core_cpu_s() == 0


async def test_a_finished_request_of_a_slow_reader_is_no_work(config):
    async with running(config) as llm, aclosing(llm.generate("hi", scripted("abc"), "r")) as outputs:
        await anext(outputs)
        while llm.num_unfinished:
            await asyncio.sleep(0.01)
        assert (await llm.debug_requests()) == []


async def test_health_reports_the_reason_of_a_dead_engine(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        context = served.server._context
        assert context.unhealthy_reason is None
        served.engine.is_dead = True
        assert context.unhealthy_reason == "the engine core was killed."
