"""Weights and limits of tenants, from the file of a router or a server to the engine."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from octavo_server.http import api_keys
from octavo_server.http.responses import SSEResponse
from octavo_testing.fleets import until
from octavo_testing.raw_http import JSON_TYPE, RawConnection, request_bytes
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

KEYS = "alice: sk-a\nbob: sk-b\n"
TENANTS = "default: {weight: 2}\ntenants: {alice: {weight: 0.5, maxTokens: 3}}\n"
BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}
BEAMS = {"prompt": "hi", "max_tokens": 9, "use_beam_search": True, "n": 2, "temperature": 0}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(api_keys, "CHECK_EVERY_S", 0.0)
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    return tmp_path


def bearer(key):
    return {"authorization": f"Bearer {key}", "x-octavo-weight": "100", "x-octavo-max-tokens": "1"}


def of_files(files):
    return {"api_key_file": (files / "keys",), "tenants_file": files / "tenants.yaml"}


async def check_engine(http, engine):
    """Assert what the engine gets with requests of both keys."""
    for path, body in BODIES.items():
        for key in ("sk-a", "sk-b"):
            assert (await http.post(path, json=body, headers=bearer(key))).status_code == 200
    requests = [(request.tenant, request.weight, request.params.max_tokens) for request in engine.requests]
    room = engine.frontend.max_model_len - len(engine.requests[3].prompt_token_ids)
    assert requests == [
        *[("alice", 0.5, 3), ("bob", 2.0, 9)],
        *[("alice", 0.5, 3), ("bob", 2.0, room)],
        *[("alice", 0.5, 2), ("bob", 2.0, 2)],
    ]


async def test_a_server_reads_its_own_file(files):
    engine = ScriptedClient(write_byte_model(files))
    async with serving(engine, **of_files(files)) as served:
        await check_engine(served.http, engine)
        engine.requests.clear()
        (files / "tenants.yaml").write_text("tenants: {bob: {weight: 4}}")
        for key in ("sk-a", "sk-b"):
            assert (await served.http.post("/v1/completions", json=BEAMS, headers=bearer(key))).status_code == 200
        weights = {(request.tenant, request.weight) for request in engine.requests}
        assert weights == {("alice", 1.0), ("bob", 4.0)}


@pytest.mark.parametrize("of_server", ["", "default: {weight: 7, maxTokens: 1}"], ids=["no file", "another file"])
async def test_a_router_sends_what_its_file_has(files, of_server):
    engine = ScriptedClient(write_byte_model(files))
    own = {"router_secret": ("s3cret",)}
    if of_server:
        (files / "of_server.yaml").write_text(of_server)
        own["tenants_file"] = files / "of_server.yaml"
    async with (
        serving(engine, **own) as served,
        routing(served.url, router_secret=("s3cret",), **of_files(files)) as routed,
    ):
        await routed.routable(MODEL, 1)
        if not of_server:
            await check_engine(routed.http, engine)
        else:
            for key in ("sk-a", "sk-b"):
                await routed.http.post("/v1/completions", json=BODIES["/v1/completions"], headers=bearer(key))
            assert [request.weight for request in engine.requests] == [0.5, 2.0]
            assert [request.params.max_tokens for request in engine.requests] == [3, 9]


@asynccontextmanager
async def entry(kind, files, engine):
    """Yield the HTTP client of a server with the file, or of a router with the file before a server without it."""
    if kind == "server":
        async with serving(engine, **of_files(files)) as served:
            yield served
    else:
        async with (
            serving(engine, router_secret=("s3cret",)) as served,
            routing(served.url, router_secret=("s3cret",), **of_files(files)) as routed,
        ):
            await routed.routable(MODEL, 1)
            yield routed


@pytest.fixture(params=["server", "router"])
async def limited(request, files):
    """A client and an engine; alice has 3 requests and 40 tokens a minute, and two requests at once."""
    (files / "tenants.yaml").write_text(
        "tenants: {alice: {requestsPerMinute: 3, tokensPerMinute: 40, concurrentRequests: 2}}"
    )
    engine = ScriptedClient(write_byte_model(files))
    async with entry(request.param, files, engine) as started:
        yield started.http, engine


def left(answer, what):
    return answer.status_code, *(answer.headers.get(f"x-ratelimit-{name}-{what}") for name in ("limit", "remaining"))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_requests_beyond_the_limit_get_a_429_and_other_keys_lose_nothing(limited, is_stream):
    http, engine = limited
    body = {"prompt": "hi", "max_tokens": 1, "stream": is_stream}

    async def complete(key, **fields):
        return await http.post("/v1/completions", json=body | fields, headers=bearer(key))

    assert (await complete("sk-a", n=-1)).status_code == 400
    assert (await http.post("/tokenize", json={"prompt": "hi"}, headers=bearer("sk-a"))).status_code == 200
    got = [left(await complete("sk-a"), "requests") for _ in range(4)]
    assert got == [(200, "3", "2"), (200, "3", "1"), (200, "3", "0"), (429, "3", "0")]
    refused = await complete("sk-a")
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("RateLimitError", "rate_limit_exceeded", None)
    assert "'alice' used 3 requests" in error["message"]
    assert refused.headers["retry-after"] in ("59", "60")
    assert refused.headers["x-ratelimit-reset-requests"].removesuffix("s") in ("59", "60")
    for _ in range(5):
        assert left(await complete("sk-b"), "requests") == (200, None, None)
    assert len(engine.requests) == 8


async def test_requests_beyond_the_limit_get_a_429_before_their_body_is_read(limited):
    http, engine = limited
    body = {"prompt": "hi", "max_tokens": 1}
    for _ in range(3):
        assert (await http.post("/v1/completions", json=body, headers=bearer("sk-a"))).status_code == 200
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-a\r\n" + JSON_TYPE
    head += b"Content-Length: 999999999\r\n\r\n"
    for path, status in ((b"/v1/completions", 429), (b"/v1/chat/completions", 429), (b"/tokenize", 413)):
        async with await RawConnection.open(http.base_url.port) as connection:
            await connection.send(head % path)
            (answer,) = await connection.read_answers(1)
            assert answer.status == status, path
    assert len(engine.requests) == 3


async def test_tokens_beyond_the_limit_get_a_429(limited):
    http, _ = limited
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * 50}]}
    sent = {"json": body, "headers": bearer("sk-a")}
    assert left(await http.post("/v1/chat/completions", **sent), "tokens") == (200, "40", "0")
    assert left(await http.post("/v1/chat/completions", **sent), "tokens") == (429, "40", "0")
    refused = await http.post("/v1/messages", json=body | {"model": MODEL}, headers=bearer("sk-a"))
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_requests_in_progress_beyond_the_limit_get_a_429(limited):
    http, engine = limited
    engine.hold_at = 0

    def complete():
        return asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"}, headers=bearer("sk-a")))

    held = [complete(), complete()]
    await until(lambda: len(engine.running) == 2)
    refused = await complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "has 2 requests in progress" in refused.json()["error"]["message"]
    held[0].cancel()
    await until(lambda: len(engine.running) == 1)
    last = complete()
    await until(lambda: len(engine.running) == 2)
    engine.resumed.set()
    assert [(await task).status_code for task in (held[1], last)] == [200, 200]


async def test_requests_of_a_key_that_is_removed_end_normally(limited, files):
    http, engine = limited
    engine.hold_at = 0
    sent = {"json": {"prompt": "hi"}, "headers": bearer("sk-a")}
    held = asyncio.create_task(http.post("/v1/completions", **sent))
    await until(lambda: len(engine.running) == 1)
    (files / "keys").write_text("bob: sk-b\n")
    (files / "tenants.yaml").write_text("tenants: {}")
    assert (await http.post("/v1/completions", **sent)).status_code == 401
    engine.resumed.set()
    answer = await held
    assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
    assert (await http.post("/v1/completions", json={"prompt": "hi"}, headers=bearer("sk-b"))).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", ["server", "router"])
async def test_a_request_has_ended_when_the_next_one_of_its_connection_begins(files, kind, is_stream):
    (files / "tenants.yaml").write_text("tenants: {alice: {concurrentRequests: 1}}")
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": is_stream}).encode()
    request = request_bytes(body, lines=(b"Authorization: Bearer sk-a",))
    async with (
        entry(kind, files, ScriptedClient(write_byte_model(files))) as started,
        await RawConnection.open(started.http.base_url.port) as connection,
    ):
        await connection.send(request * 5)
        assert [answer.status for answer in await connection.read_answers(5)] == [200] * 5


ENDS = {
    "/v1/completions": b'"finish_reason":"stop"',
    "/v1/chat/completions": b'"finish_reason":"stop"',
    "/v1/responses": b"event: response.completed",
    "/v1/messages": b"event: message_stop",
}


@pytest.mark.parametrize("path", ENDS)
async def test_a_stream_leaves_its_places_before_it_sends_its_end(files, path, monkeypatch):
    """A client may send its next request as soon as it has the end, on another connection."""
    (files / "tenants.yaml").write_text("tenants: {alice: {concurrentRequests: 1}}")
    bodies = {**BODIES, "/v1/completions": {"prompt": ["a", "b"], "n": 2}}
    bodies["/v1/messages"] = {**BODIES["/v1/chat/completions"], "max_tokens": 99}
    bodies["/v1/responses"] = {"input": "hi"}
    run, sent = SSEResponse.__call__, []
    async with entry("server", files, ScriptedClient(write_byte_model(files))) as served:
        context = served.server._context

        async def watch(response, scope, receive, send):
            send_body = scope["state"]["send_body"]

            async def record(message):
                held = context.rate_limits.usage("alice").own, context.admission.num_seqs
                sent.append((ENDS[path] in message["body"], held))
                await send_body(message)

            scope["state"]["send_body"] = record
            await run(response, scope, receive, send)

        monkeypatch.setattr(SSEResponse, "__call__", watch)
        body = {"model": MODEL, "stream": True, **bodies[path]}
        assert (await served.http.post(path, json=body, headers=bearer("sk-a"))).status_code == 200
    num_seqs = 4 if path == "/v1/completions" else 1
    assert sent[0] == (False, (1, num_seqs))
    assert sent[-1] == (True, (0, 0))
