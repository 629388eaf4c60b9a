"""Invalid requests of clients, and a router that is killed or stopped. Real processes."""

import asyncio
import json
import signal
import socket
import time

import httpx
import pytest
from octavo_server.config import BodyLimits
from octavo_testing.route_command import octavo_route, served_replicas
from octavo_testing.server import events

pytestmark = pytest.mark.slow

MAX_BODY_BYTES = BodyLimits().body_bytes
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL = {"model": "tiny", "prompt": "abc", "max_tokens": 2}


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routed")
    with served_replicas(folder, 2) as replicas:
        flags = [word for replica in replicas for word in ("--replica", replica.url)]
        with octavo_route(folder, *flags) as route:
            route.wait_until_exact(2)
            yield replicas, route


@pytest.fixture
def http(routed):
    with httpx.Client(base_url=routed[1].url, timeout=240) as client:
        yield client


def direct(routed, path, **options):
    return httpx.post(routed[0][0].url + path, timeout=240, **options)


def test_a_prompt_of_a_megabyte_is_refused_with_the_replicas_message(routed, http):
    for path, body in (
        (TEXT, {**SMALL, "prompt": "a b " * 262_144}),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "a b " * 262_144}]}),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()) == (400, direct(routed, path, json=body).json())
        assert http.post(TEXT, json=SMALL).status_code == 200


def test_large_prompts_do_not_block_other_requests(routed):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a b " * 262_144}]}

    async def run():
        async with httpx.AsyncClient(base_url=routed[1].url, timeout=240) as http:
            large = [asyncio.create_task(http.post(CHAT, json=body)) for _ in range(4)]
            small = [(await http.post(TEXT, json=SMALL)).status_code for _ in range(20)]
            return small, [(await task).status_code for task in large]

    small, large = asyncio.run(run())
    assert (set(small), set(large)) == ({200}, {400})


def test_a_body_above_the_limit_is_refused_with_the_limit(http):
    answer = http.post(TEXT, content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 1}', b"[" * 5000, b"\xff\xfe"])
def test_invalid_requests_are_refused_as_a_replica_refuses_them(routed, http, content):
    sent = {"content": content, "headers": {"content-type": "application/json"}}
    answer = http.post(TEXT, **sent)
    assert (answer.status_code, answer.json()) == (400, direct(routed, TEXT, **sent).json())


def test_an_unknown_model_is_not_found(routed, http):
    answer = http.post(TEXT, json={**SMALL, "model": "other"})
    assert (answer.status_code, answer.json()) == (404, direct(routed, TEXT, json={**SMALL, "model": "other"}).json())


def test_refusals_are_counted_without_client_supplied_model_names(routed, http):
    http.post(TEXT, json={**SMALL, "model": "made up"})
    http.post(TEXT, content=b" " * (MAX_BODY_BYTES + 1))
    metrics = http.get("/metrics").text
    assert "made up" not in metrics
    for code in (404, 413):
        assert f'octavo_router_requests_total{{model="",code="{code}",reason="refused"}}' in metrics


def send_raw(route, data):
    """Send raw bytes and return the first bytes of the response, none if the router closes the connection."""
    with socket.create_connection(("127.0.0.1", route.port), timeout=240) as sock:
        sock.sendall(data)
        return sock.recv(65536)


def test_an_endless_head_closes_the_connection(routed):
    _, route = routed
    with socket.create_connection(("127.0.0.1", route.port), timeout=240) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        line = b"X-Filler: " + b"x" * 8192 + b"\r\n"
        with pytest.raises(ConnectionError):
            sock.sendall(line * 8192)
    assert httpx.post(route.url + TEXT, json=SMALL).status_code == 200


def test_large_headers_are_forwarded(routed):
    _, route = routed
    body = json.dumps(SMALL).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"X-Filler: %s\r\nContent-Length: %d\r\n\r\n"
    assert send_raw(route, head % (b"x" * 16384, len(body)) + body).startswith(b"HTTP/1.1 200 ")


def test_router_headers_of_clients_are_not_forwarded(routed, http):
    headers = {"x-octavo-tenant": "somebody", "x-octavo-secret": "guess", "x-octavo-salt": "y"}
    assert http.post(TEXT, json=SMALL, headers=headers).status_code == 200


def test_a_restarted_router_learns_all_caches_again(routed):
    _, route = routed
    route.kill()
    route.start()
    route.wait_until_exact(2)
    body = {**SMALL, "prompt": "of some blocks, so that there is something to know"}
    deadline = time.monotonic() + 30
    while (answer := httpx.post(route.url + TEXT, json=body)).headers["x-octavo-rung"] != "exact":
        assert answer.status_code == 200
        assert time.monotonic() < deadline


def test_a_stopping_router_lets_its_streams_finish(tmp_path):
    with (
        served_replicas(tmp_path, 1, has_valves=True) as (replica,),
        octavo_route(tmp_path, "--replica", replica.url) as route,
    ):
        route.wait_until_exact(1)
        assert asyncio.run(_stopped_in_the_middle(route, replica)) == (503, "length", "bye")
        assert route.stop() == 0


def test_a_stopping_router_serves_requests_during_the_shutdown_delay(tmp_path):
    with (
        served_replicas(tmp_path, 1) as (replica,),
        octavo_route(tmp_path, "--replica", replica.url, "--shutdown-delay", "600") as route,
    ):
        route.wait_until_exact(1)
        route.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{route.url}/ready").status_code == 200:
            pass
        late = httpx.post(route.url + TEXT, json=SMALL)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        assert route.stop() == 0


async def _stopped_in_the_middle(route, replica):
    """Return the status of a late request, the end of the stream, and the last event of the state stream."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=route.url, timeout=240, limits=limits) as http:
        state = asyncio.create_task(_read_all(http, "GET", "/state/events"))
        body = {**SMALL, "max_tokens": 20, "ignore_eos": True, "stream": True}
        begun = asyncio.Event()
        stream = asyncio.create_task(_read_all(http, "POST", TEXT, begun, json=body))
        while not begun.is_set():
            replica.valve.allow_steps()
            await asyncio.sleep(0.02)
        route.process.send_signal(signal.SIGTERM)
        while (await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        late = await http.post(TEXT, json=SMALL)
        replica.valve.open()
        finish = json.loads(events(await stream)[-2])["choices"][0]["finish_reason"]
        return late.status_code, finish, json.loads(events(await state)[-1])["type"]


async def _read_all(http, method, path, begun=None, **options):
    text = ""
    async with http.stream(method, path, **options) as answer:
        async for part in answer.aiter_text():
            text += part
            if begun is not None:
                begun.set()
    return text
