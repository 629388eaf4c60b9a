"""Draining, from the signal to stop until the last stream has ended."""

import asyncio
from contextlib import suppress

import httpx
import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

TEXT = "/v1/completions"
DRAIN_S = 60.0


@pytest.fixture
def engine(tmp_path):
    return ScriptedClient(write_byte_model(tmp_path))


@pytest.fixture
async def served(engine):
    async with serving(engine, drain_timeout=DRAIN_S) as started:
        yield started


async def open_stream(served):
    """A begun stream of a held engine."""
    served.engine.hold_at = 2
    request = served.http.build_request("POST", TEXT, json={"prompt": "hi", "stream": True})
    answer = await served.http.send(request, stream=True)
    lines = answer.aiter_lines()
    assert '"text":"H"' in await anext(lines)
    return answer, lines


async def finished(served, lines):
    served.engine.resumed.set()
    rest = [line async for line in lines if line]
    return '"finish_reason":"stop"' in rest[-2] and rest[-1] == "data: [DONE]"


async def state(served):
    return (await served.http.get("/ready")).json()["state"]


async def until_stopped(served):
    """Wait until the listener is closed."""
    async with httpx.AsyncClient(base_url=served.url) as other:
        with suppress(httpx.TransportError):
            while await other.get("/health"):
                pass


async def test_an_idle_server_stops_at_once(served):
    await served.stop()
    await until_stopped(served)


async def test_new_requests_are_refused_while_streams_finish(served):
    answer, lines = await open_stream(served)
    await served.stop()
    for _ in range(2):
        late = await served.http.post(TEXT, json={"prompt": "late"})
        assert (late.status_code, late.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        assert int(late.headers["retry-after"]) > 0
        assert late.headers["connection"] == "close"
    assert len(served.engine.requests) == 1
    assert await finished(served, lines)
    await answer.aclose()
    await until_stopped(served)


async def test_a_draining_server_is_alive_and_not_ready(served):
    assert (await served.http.get("/ready")).json() == {"ready": True, "state": "accepting", "reason": None}
    answer, lines = await open_stream(served)
    await served.stop()
    ready = await served.http.get("/ready")
    assert (ready.status_code, ready.json()["ready"], ready.json()["state"]) == (503, False, "stopping")
    assert ready.headers["connection"] == "close"
    for path in ("/health", "/metrics", "/load"):
        assert (await served.http.get(path)).status_code == 200
    assert await finished(served, lines)
    await answer.aclose()


async def test_a_request_that_is_still_being_read_is_waited_for(served):
    async def slowly():
        yield b'{"prompt": "hi",'
        await half.wait()
        yield b'"max_tokens": 3}'

    half = asyncio.Event()
    sending = asyncio.create_task(
        served.http.post(TEXT, content=slowly(), headers={"content-type": "application/json"})
    )
    while (await served.http.get("/drain")).json()["running"] != 1:
        await asyncio.sleep(0.001)
    await served.stop()
    assert await state(served) == "stopping"
    half.set()
    assert (await sending).status_code == 200
    await until_stopped(served)


async def test_streams_that_outlast_the_drain_timeout_end_with_an_event(engine):
    async with serving(engine, drain_timeout=0.2) as served:
        answer, lines = await open_stream(served)
        await served.stop()
        rest = [line async for line in lines if line]
        assert "The server is shutting down" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        await answer.aclose()
        assert len(served.engine.running) == 0


async def test_a_plain_request_that_outlasts_the_drain_gets_a_status(engine):
    async with serving(engine, drain_timeout=0.2) as served:
        served.engine.hold_at = 1
        sending = asyncio.create_task(served.http.post(TEXT, json={"prompt": "a"}))
        await served.engine.held.wait()
        await served.stop()
        answer = await sending
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_a_second_signal_ends_everything_at_once(served):
    answer, lines = await open_stream(served)
    await served.stop()
    await served.stop()
    rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    await answer.aclose()
    await until_stopped(served)


async def test_a_drain_by_http_can_be_resumed(served):
    answer, lines = await open_stream(served)
    drained = (await served.http.post("/drain")).json()
    assert (drained["state"], drained["running"]) == ("draining", 1)
    assert 0 < drained["remaining_s"] <= DRAIN_S
    assert (await served.http.post("/drain")).json()["remaining_s"] <= drained["remaining_s"]
    assert (await served.http.post(TEXT, json={"prompt": "late"})).status_code == 503
    assert await finished(served, lines)
    await answer.aclose()
    while (shown := (await served.http.get("/drain")).json())["running"]:
        pass
    assert shown["state"] == await state(served) == "draining"
    assert (await served.http.delete("/drain")).json()["state"] == "accepting"
    assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200


async def test_a_resumed_server_accepts_requests_after_a_drain(engine):
    async with serving(engine, drain_timeout=0.05) as served:
        answer, lines = await open_stream(served)
        await served.http.post("/drain")
        assert [line async for line in lines if line][-1] == "data: [DONE]"
        await answer.aclose()
        await served.http.delete("/drain")
        engine.hold_at = None
        assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200


async def test_a_stopping_server_cannot_resume(served):
    answer, lines = await open_stream(served)
    await served.stop()
    refused = await served.http.delete("/drain")
    assert (refused.status_code, refused.json()["state"]) == (409, "stopping")
    assert await finished(served, lines)
    await answer.aclose()


async def test_a_dead_engine_is_not_ready(served):
    served.engine.is_dead = True
    answer = await served.http.get("/ready")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
    assert answer.json()["reason"]
