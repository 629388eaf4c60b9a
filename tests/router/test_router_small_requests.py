"""Small requests over one client connection: pieces, pipelining, idle time, draining, and clients that leave."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import until
from octavo_testing.routing import routing

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
CHANGING = (b"date:", b"x-request-id:")


def head(body=BODY, *more, path=CHAT):
    lines = (f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *more)
    return "\r\n".join((*lines, "", "")).encode()


class Client:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def answer(self):
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        (length,) = (int(line[16:]) for line in lines if line.startswith(b"content-length: "))
        return [line for line in lines if not line.startswith(CHANGING)], await self.reader.readexactly(length)


class OneReplica:
    def __init__(self, stack, answer):
        self.stack, self.replica = stack, FakeReplica()
        self.replica.answers[CHAT] = answer

    async def route(self, **settings):
        await self.replica.start()
        self.stack.push_async_callback(self.replica.stop)
        self.routed = await self.stack.enter_async_context(routing(self.replica.url, **settings))
        await self.routed.routable(MODEL, 1)
        (await self.routed.http.post(CHAT, content=BODY)).raise_for_status()  # so there is a connection to the replica
        return self.routed

    async def client(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.routed.url.rsplit(":", 1)[1]))
        self.stack.callback(writer.close)
        return Client(reader, writer)


@pytest.fixture
async def make_replica():
    async with AsyncExitStack() as stack:
        yield lambda answer: OneReplica(stack, answer)


async def echo(request):
    return web.json_response(await request.json())


async def test_a_request_in_several_segments_gets_the_same_response(make_replica):
    one_replica = make_replica(echo)
    await one_replica.route()
    client = await one_replica.client()
    answers = []
    for pieces in ([head() + BODY], [head(), BODY], [head() + BODY[:7], BODY[7:]]):
        for piece in pieces:
            client.writer.write(piece)
            await client.writer.drain()
            await asyncio.sleep(0)
        answers.append(await client.answer())
    client.writer.write(head())
    await asyncio.sleep(0.15)
    client.writer.write(BODY)
    answers.append(await client.answer())
    assert answers == [answers[0]] * 4
    assert answers[0][1] == json.dumps(json.loads(BODY)).encode()


async def test_pipelined_requests_are_answered_in_order(make_replica):
    gate = asyncio.Event()

    async def answer(request):
        body = await request.json()
        if body["messages"][0]["content"] == "0":
            await gate.wait()
        return web.json_response(body)

    one_replica = make_replica(answer)
    await one_replica.route()
    client = await one_replica.client()
    bodies = [
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": str(n)}]}).encode() for n in range(3)
    ]
    client.writer.write(b"".join(head(body) + body for body in bodies))
    await asyncio.sleep(0.05)
    gate.set()
    assert [(await client.answer())[1] for _ in bodies] == bodies


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(make_replica):
    one_replica = make_replica(echo)
    await one_replica.route(keep_alive_timeout=1)
    client, loop = await one_replica.client(), asyncio.get_running_loop()
    for _ in range(3):
        client.writer.write(head() + BODY)
        await client.answer()
        await asyncio.sleep(0.5)
    answered_s = loop.time() - 0.5
    assert await client.reader.read() == b""
    assert 0.8 < loop.time() - answered_s < 3


async def test_a_connection_that_ends_with_its_response_is_closed(make_replica):
    one_replica = make_replica(echo)
    await one_replica.route()
    client = await one_replica.client()
    client.writer.write(head(BODY, "connection: close") + BODY)
    lines, _ = await client.answer()
    assert b"connection: close" in lines
    assert await client.reader.read() == b""


async def test_a_request_that_outlasts_the_drain_gets_an_error(make_replica):
    hold, num_held = asyncio.Event(), 0

    async def answer(request):
        nonlocal num_held
        body = await request.json()
        if body["messages"][0]["content"] == "wait":
            num_held += 1
            await hold.wait()
        return web.json_response(body)

    one_replica = make_replica(answer)
    routed = await one_replica.route(drain_timeout=0.2)
    client = await one_replica.client()
    body = BODY.replace(b"hi", b"wait")
    client.writer.write(head(body) + body)
    await until(lambda: num_held == 1)
    assert routed.router.lifecycle.num_requests == 1
    routed.router.lifecycle.drain()
    lines, said = await client.answer()
    assert lines[0].split()[1] == b"503"
    assert "shutting down" in json.loads(said)["error"]["message"]
    await until(lambda: not routed.router.lifecycle.num_requests and not len(routed.router.in_flight))
    hold.set()


async def test_a_client_disconnect_is_counted_once_and_reaches_the_replica(make_replica):
    left = asyncio.Event()

    async def answer(request):
        body = await request.json()
        if body["messages"][0]["content"] == "wait":
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                left.set()
                raise
        return web.json_response(body)

    one_replica = make_replica(answer)
    routed = await one_replica.route()
    client = await one_replica.client()
    body = BODY.replace(b"hi", b"wait")
    client.writer.write(head(body) + body)
    await until(lambda: routed.router.lifecycle.num_requests == 1)
    client.writer.close()
    await asyncio.wait_for(left.wait(), 120)
    await until(lambda: not routed.router.lifecycle.num_requests)
    counted = dict(routed.router.telemetry.metrics.snapshot().counts["requests_total"])
    assert counted == {(MODEL, "200", "finished"): 1, (MODEL, "499", "client left"): 1}
    (replica,) = routed.router.fleet.replicas
    assert replica.num_in_flight == 0
