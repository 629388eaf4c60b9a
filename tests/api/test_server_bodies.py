"""Bodies that are too large, too slow or incomplete, over a real socket."""

import asyncio
import logging
import re

import pytest
from octavo_server.config import RequestLimits
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, held_in_threads, serving

TEXT = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
UNFINISHED = HEAD + b"Content-Length: 100\r\n\r\n{"
LIMIT = 100_000


@pytest.fixture
async def served(tmp_path):
    limits = RequestLimits(max_request_bytes=LIMIT, max_prompt_chars=LIMIT // 2)
    async with serving(ScriptedClient(write_byte_model(tmp_path)), limits=limits) as started:
        yield started


async def still_serves(served):
    return (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(("images", "limit"), [(None, 4 * 2**20), (object(), 32 * 2**20)], ids=["text", "images"])
async def test_the_default_limit_follows_from_the_model(tmp_path, images, limit):
    engine = ScriptedClient(write_byte_model(tmp_path))
    engine.frontend.images = images
    async with serving(engine) as started:
        assert started.server.config.app.state.context.config.limits.body_bytes == limit


async def test_a_given_limit_holds_for_each_model(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    engine.frontend.images = object()
    async with serving(engine, limits=RequestLimits(max_request_bytes=9)) as started:
        assert (await started.http.post(TEXT, json={"prompt": "a"})).status_code == 413


HI = [{"role": "user", "content": "a"}]
PROMPTS = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/chat/completions/render", {"messages": HI}),
    ("/v1/messages", {"messages": HI, "model": "scripted", "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": HI, "model": "scripted"}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/responses/input_tokens", {"input": "a", "truncation": "auto"}),
    (TEXT, {"prompt": ["a", "b"]}),
    ("/tokenize", {"messages": HI}),
    ("/tokenize", {"prompt": "a"}),
]


@pytest.mark.parametrize(("path", "body"), PROMPTS, ids=lambda value: value if isinstance(value, str) else None)
async def test_a_body_holds_its_memory_until_its_prompts_are_made(served, monkeypatch, path, body):
    """Requests that wait for a thread could take all memory otherwise."""
    held = held_in_threads(served, monkeypatch)
    assert (await served.http.post(path, json=body | {"metadata": {"user_id": "x" * 200}})).status_code == 200
    assert held
    assert min(held) > 200
    assert served.server.config.app.state.context.body_budget.num_bytes == 0


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_declared_size_beyond_the_limit_is_refused(served, path):
    answer = await served.http.post(path, content=b"x" * (LIMIT + 1), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (413, "RequestTooLargeError", 413)
    assert f"The request body has {LIMIT + 1} bytes; the limit is {LIMIT}: send less" in error["message"]
    assert "--max-request-bytes" in error["message"]
    assert await still_serves(served)


async def test_a_chunked_body_beyond_the_limit_is_refused(served):
    sent = 0

    async def chunks():
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b" " * 1000

    answer = await served.http.post(TEXT, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert sent == 1_000_000
    read = re.search(rf"has at least (\d+) bytes; the limit is {LIMIT}: ", answer.json()["error"]["message"])
    assert LIMIT < int(read[1]) <= sent
    assert await still_serves(served)


async def test_a_body_of_exactly_the_limit_is_accepted(served):
    body = b'{"prompt": "a"}'
    assert (
        await served.http.post(
            TEXT, content=body + b" " * (LIMIT - len(body)), headers={"content-type": "application/json"}
        )
    ).status_code == 200


async def test_a_body_that_never_ends_is_timed_out(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, limits=RequestLimits(request_timeout=0.3)) as served:
        reader, writer = await connect(served)
        writer.write(UNFINISHED)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer.lower()
        assert b"--request-timeout" in answer
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_vanishes_within_its_body_leaves_no_request(served, caplog):
    with caplog.at_level(logging.DEBUG, "octavo_server"):
        _, writer = await connect(served)
        writer.write(UNFINISHED)
        await writer.drain()
        while (await served.http.get("/drain")).json()["running"] != 1:
            await asyncio.sleep(0.001)
        writer.close()
        await writer.wait_closed()
        while (await served.http.get("/drain")).json()["running"]:
            await asyncio.sleep(0.001)
        while not (found := [r for r in caplog.records if "before the body was complete" in r.message]):
            await asyncio.sleep(0.001)  # the request has left the count before it is logged
    assert [record.levelno for record in found] == [logging.DEBUG]
    assert not served.engine.requests


async def test_a_text_far_beyond_the_context_is_not_tokenised(served, monkeypatch):
    def tokenised(*_, **__):
        raise AssertionError("tokenised")

    monkeypatch.setattr(type(served.engine.frontend.tokenizer), "encode", tokenised)
    body = {"prompt": "x" * 50_000}
    answer = await served.http.post(TEXT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_tokens")
    chat = {"messages": [{"role": "user", "content": "x" * 50_000}]}
    answer = await served.http.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_tokens")


async def test_tokenize_takes_what_could_fit_the_context(served):
    most = served.engine.frontend.max_model_len * max(
        map(len, map(served.engine.frontend.tokenizer.token_bytes, range(256)))
    )
    assert (await served.http.post("/tokenize", json={"prompt": "x" * most})).status_code == 200
    answer = await served.http.post("/tokenize", json={"prompt": "x" * 50_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_tokens")


async def connect(served):
    return await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
