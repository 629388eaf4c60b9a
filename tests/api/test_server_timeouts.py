"""Clients that don't read, don't finish a request, or send nothing are disconnected, and no memory grows."""

import asyncio
import json
import logging
import socket
from contextlib import suppress

import pytest
from octavo_server.config import RequestLimits
from octavo_server.http.request_framing import MAX_HEAD_BYTES, MAX_HEADERS
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

pytestmark = pytest.mark.slow

LIMITS = RequestLimits(request_timeout=0.2)
MAX_BACKLOG_BYTES = 256 * 1024
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def engine(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    engine.replies = ["x" * 500]
    return engine


async def connect(served):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", int(served.url.rpartition(":")[2])))
    return await asyncio.open_connection(sock=sock, limit=4096)


async def close(writer):
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


def large_stream():
    """A stream of several megabytes, far more than the socket's own buffers hold."""
    fields = {"max_tokens": 500, "n": 16, "temperature": 1, "logprobs": 20, "ignore_eos": True, "stream": True}
    return post("/v1/completions", {"prompt": "a", **fields})


def post(path, fields):
    body = json.dumps(fields).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), len(body)) + body


async def test_an_unread_stream_is_aborted_and_bounded_in_memory(engine, caplog):
    async with serving(engine, slow_client_timeout=0.3) as served:
        _, writer = await connect(served)
        writer.transport.pause_reading()
        with caplog.at_level(logging.INFO, "octavo_server"):
            writer.write(large_stream())
            while not served.server.server_state.connections or not engine.running:
                await asyncio.sleep(0.001)
            (connection,) = served.server.server_state.connections
            backlog = 0
            while engine.aborted.empty():
                backlog = max(backlog, connection.transport.get_write_buffer_size())
                await asyncio.sleep(0.01)
        assert 0 < backlog < MAX_BACKLOG_BYTES
        assert not engine.running
        assert "has not read" in caplog.text
        await close(writer)


async def test_an_unread_whole_response_is_dropped(engine):
    async with serving(engine, slow_client_timeout=0.3) as served:
        _, writer = await connect(served)
        writer.transport.pause_reading()
        writer.write(post("/tokenize", {"prompt": "x" * 600_000, "return_token_strs": True}))
        while not served.server.server_state.connections:
            await asyncio.sleep(0.001)
        while served.server.server_state.connections:
            await asyncio.sleep(0.01)
        await close(writer)


async def test_a_slow_reader_receives_everything(engine):
    async with serving(engine, slow_client_timeout=60) as served:
        reader, writer = await connect(served)
        writer.write(large_stream())
        got = b""
        while b"data: [DONE]" not in got:
            got = got[-20:] + await reader.read(4096)
            await asyncio.sleep(0)
        assert engine.aborted.empty()
        await close(writer)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1", HEAD, b"\r\n", HEAD + b"Content-Length: 5\r\nX-Cut: "], ids=range(5)
)
async def test_an_endless_head_closes_the_connection(engine, sent):
    async with serving(engine, limits=LIMITS, keep_alive_timeout=1) as served:
        reader, writer = await connect(served)
        writer.write(sent)
        assert await reader.read() == b""
        await close(writer)


async def test_a_head_has_less_time_than_a_body(engine, monkeypatch):
    monkeypatch.setattr("octavo_server.http.timeout_protocol.HEAD_TIMEOUT_S", 0.1)
    async with serving(engine) as served:
        reader, writer = await connect(served)
        writer.write(HEAD)
        assert await reader.read() == b""
        await close(writer)


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX-Endless: "], ids=range(2))
async def test_an_endless_head_is_refused(engine, start):
    async with serving(engine) as served:
        reader, writer = await connect(served)
        writer.write(start + b"x" * MAX_HEAD_BYTES)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"%d bytes, the limit" % MAX_HEAD_BYTES in answer
        await close(writer)


@pytest.mark.parametrize("end", [b"b", b"\r\n"], ids=["partial", "whole"])
async def test_a_head_with_too_many_headers_is_refused(engine, end):
    async with serving(engine, keep_alive_timeout=1) as served:
        reader, writer = await connect(served)
        writer.write(b"GET /ping HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEADERS + 1) + end)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"more than %d headers, the limit" % MAX_HEADERS in answer
        await close(writer)


async def test_a_head_with_just_enough_headers_is_read(engine):
    async with serving(engine) as served:
        reader, writer = await connect(served)
        writer.write(b"GET /ping HTTP/1.1\r\n" + b"a:\r\n" * MAX_HEADERS + b"\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        await close(writer)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * MAX_HEAD_BYTES),
        b"GET /ping HTTP/1.1\r\nX-Long: %s\r\n\r\n" % (b"x" * MAX_HEAD_BYTES),
        HEAD + b"X-Long: %s\r\nContent-Length: 2\r\n\r\n{}" % (b"x" * MAX_HEAD_BYTES),
    ],
    ids=["url", "header", "body"],
)
async def test_a_whole_head_that_is_too_large_is_refused(engine, head):
    async with serving(engine, keep_alive_timeout=1) as served:
        reader, writer = await connect(served)
        writer.write(b"GET /ping HTTP/1.1\r\n\r\n" + head)
        answers = await reader.read()
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert answers.count(b"HTTP/1.1") == answers.count(b"HTTP/1.1 431 ") + 1 == 2
        assert b"%d bytes, the limit" % MAX_HEAD_BYTES in answers
        await close(writer)


async def test_a_head_just_below_the_limit_is_read(engine):
    async with serving(engine) as served:
        answer = await served.http.get("/ping", headers={"x-long": "x" * (MAX_HEAD_BYTES - 500)})
        assert answer.status_code == 200


async def test_a_body_that_trickles_after_its_response_closes_the_connection(engine, monkeypatch):
    monkeypatch.setattr("octavo_server.http.timeout_protocol.BODY_GRACE_S", 0.1)
    async with serving(engine, limits=LIMITS, api_key=("k",)) as served:
        reader, writer = await connect(served)
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
        assert b"401" in await reader.readuntil(b"\r\n")
        rest = asyncio.create_task(reader.read())
        while not rest.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        await close(writer)


async def test_an_empty_line_does_not_keep_an_idle_connection_open(engine):
    async with serving(engine, limits=LIMITS, keep_alive_timeout=1) as served:
        reader, writer = await connect(served)
        writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in await reader.readuntil(b"\r\n")
        writer.write(b"\r\n")
        await reader.read()
        await close(writer)


async def test_the_timeouts_do_not_end_a_running_request(engine):
    engine.replies = ["fine"]
    async with serving(engine, limits=LIMITS, slow_client_timeout=0.1, keep_alive_timeout=1) as served:
        engine.hold_at = 1
        sending = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "a"}))
        await engine.held.wait()
        asyncio.get_running_loop().call_later(0.5, engine.resumed.set)
        assert (await sending).json()["choices"][0]["text"] == "fine"


async def ping(reader, writer):
    writer.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def is_closed(reader, writer):
    rest = await reader.read()
    await close(writer)
    return rest == b""


async def test_beyond_the_limit_the_connection_that_was_idle_longest_is_closed(engine):
    async with serving(engine, max_connections=3) as served:
        first, second, third = [await connect(served) for _ in range(3)]
        for connection in (second, third, first):
            assert await ping(*connection)
        third[1].write(HEAD)  # a partial head is no request in progress
        fourth = await connect(served)
        assert await ping(*fourth)
        assert await is_closed(*second)
        fifth = await connect(served)
        assert await ping(*fifth)
        assert await is_closed(*third)
        for connection in (first, fourth, fifth):
            assert await ping(*connection)
            await close(connection[1])


async def test_connections_with_requests_stay_open_beyond_the_limit(engine):
    engine.replies, engine.hold_at = ["fine"], 1
    async with serving(engine, max_connections=1) as served:
        held = await connect(served)
        held[1].write(post("/v1/completions", {"prompt": "a"}))
        await engine.held.wait()
        second = await connect(served)
        assert await ping(*second)
        third = await connect(served)
        assert await ping(*third)
        assert await is_closed(*second)
        engine.resumed.set()
        assert (await held[0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        await close(held[1])
        await close(third[1])
