"""Client disconnects, a dead engine, a stopped server: every stream ends, and no request stays behind."""

import asyncio
import json

import httpx
import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, events, serving

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def served(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as started:
        yield started


def body_for(path, **fields):
    return {"messages": HELLO, **fields} if path == CHAT else {"prompt": "hi", **fields}


async def open_stream(served, path=CHAT, **fields):
    """A begun stream: its first text has arrived, and the engine is held."""
    served.engine.hold_at = 2
    request = served.http.build_request("POST", path, json=body_for(path, stream=True, **fields))
    answer = await served.http.send(request, stream=True)
    assert answer.status_code == 200
    lines = answer.aiter_lines()
    while '"text":"' not in (line := await anext(lines)) and '"content":"H"' not in line:
        pass
    return answer, lines


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_client_that_leaves_a_stream_aborts_its_request(served, path):
    answer, _ = await open_stream(served, path)
    assert len(served.engine.running) == 1
    await answer.aclose()
    aborted = await asyncio.wait_for(served.engine.aborted.get(), 120)
    assert not served.engine.running
    assert aborted.startswith(("chatcmpl-", "cmpl-"))
    assert (await served.metrics())['vllm:request_success_total{finished_reason="abort"}'] == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["plain", "streamed"])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]], ids=["one prompt", "three"])
async def test_a_disconnect_before_the_first_token_aborts_all_requests(served, fields, prompt):
    served.engine.hold_at = 0
    sending = asyncio.create_task(served.http.post(TEXT, json={"prompt": prompt, **fields}))
    await served.engine.held.wait()
    while len(served.engine.running) < len(prompt):
        await asyncio.sleep(0.001)
    sending.cancel()
    aborted = [await asyncio.wait_for(served.engine.aborted.get(), 120) for _ in prompt]
    assert len(set(aborted)) == len(prompt)
    assert not served.engine.running


async def test_the_first_text_arrives_before_the_rest_is_generated(served):
    answer, lines = await open_stream(served)
    assert served.engine.running
    served.engine.resumed.set()
    rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"
    await answer.aclose()


async def test_load_counts_running_requests(served):
    assert (await served.http.get("/load")).json() == {"server_load": 0}
    answer, lines = await open_stream(served)
    assert (await served.http.get("/load")).json() == {"server_load": 1}
    served.engine.resumed.set()
    assert [line async for line in lines]
    await answer.aclose()
    while (await served.http.get("/load")).json() != {"server_load": 0}:
        pass


async def test_a_dead_engine_ends_streams_with_an_event_and_the_server(served):
    served.engine.die_at = 2
    answer = await served.http.post(CHAT, json=body_for(CHAT, stream=True))
    *_, error, done = events(answer.text)
    assert json.loads(error)["error"]["code"] == 503
    assert json.loads(error)["error"]["type"] == "ServiceUnavailableError"
    assert done == "[DONE]"
    while not served.server.engine_died:
        await asyncio.sleep(0.01)


async def test_a_dead_engine_is_not_healthy(served):
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.http.post("/ping")).status_code == 200
    served.engine.is_dead = True
    try:
        answers = [await served.http.get(path) for path in ("/health", "/ping")]
    except httpx.TransportError:
        return  # the server ended first
    assert [answer.status_code for answer in answers] == [503, 503]


async def test_a_request_to_a_dead_engine_is_a_503(served):
    served.engine.die_at = 0
    answer = await served.http.post(TEXT, json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_two_servers_in_one_process_share_nothing(served, tmp_path):
    (tmp_path / "other").mkdir()
    async with serving(ScriptedClient(write_byte_model(tmp_path / "other"))) as other:
        assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200
        name = 'vllm:request_success_total{finished_reason="stop"}'
        assert ((await served.metrics())[name], (await other.metrics())[name]) == (1, 0)
