"""Requests of load balancers, old clients and broken clients, to the engine's server and to a router."""

import asyncio
import json

import pytest
import pytest_asyncio
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, parse_metrics, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))
    async with serving(engine) as served, routing(served.url) as routed:
        await routed.routable(MODEL, 1)
        yield {"engine": served, "router": routed}


@pytest.fixture(params=["engine", "router"])
def server(both, request):
    both["engine"].engine.reset()
    return both[request.param]


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_probes_may_use_head(server, path):
    got, head = await server.http.get(path), await server.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(got.content))


async def test_a_head_probe_shows_the_drain_of_the_router(both):
    routed = both["router"]
    routed.router.lifecycle.drain()
    assert (await routed.http.head("/ready")).status_code == 503
    routed.router.lifecycle.resume()
    assert (await routed.http.head("/ready")).status_code == 200


async def send_raw(server, *requests):
    """Head and body of all bytes that arrive until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"".join(requests))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head.lower(), body


def post(**fields):
    body = json.dumps({"model": MODEL, "prompt": "a", **fields}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_a_stream_to_http_1_0_is_unchunked_and_ends_with_the_connection(server):
    head, body = await send_raw(server, post(stream=True), post())
    assert head.startswith(b"http/1.1 200 ok\r\n")
    assert (b"transfer-encoding" in head, b"content-length" in head) == (False, False)
    assert b"\r\nconnection: close" in head
    frames = events(body.decode())
    assert "".join(json.loads(frame)["choices"][0]["text"] for frame in frames[:-1]) == "Hello, world!"
    assert frames[-1] == "[DONE]"


async def test_a_whole_response_to_http_1_0_has_a_length(server):
    head, body = await send_raw(server, post())
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head
    assert json.loads(body)["choices"][0]["text"] == "Hello, world!"


REFUSED = (
    'http_requests_total{handler="none",method="POST",status="4xx"}',
    'octavo_router_requests_total{model="",code="431",reason="refused"}',
)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "whole"])
async def test_a_head_that_is_too_large_is_counted(server, end):
    async def count():
        found = parse_metrics((await server.http.get("/metrics")).text)
        return sum(found.get(name, 0) for name in REFUSED)

    before = await count()
    head, _ = await send_raw(server, b"POST /v1/completions HTTP/1.1\r\nX-Long: " + b"x" * 70_000 + end)
    assert head.startswith(b"http/1.1 431 ")
    assert await count() == before + 1


async def test_a_client_writes_no_text_into_the_access_log(server, caplog):
    """The address in the log is that of the connection, not that of a header."""
    caplog.set_level("INFO", "uvicorn.access")
    forged = {"X-Forwarded-For": "6.6.6.6] CRITICAL forged", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "forged"}
    await server.http.get("/v1/models", headers=forged)
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert any("/v1/models" in line and line.startswith("127.0.0.1:") for line in lines)
    assert "forged" not in "".join(lines)
