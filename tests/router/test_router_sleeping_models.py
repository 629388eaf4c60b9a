"""Requests for models without a replica: which of them are held, how long, and what their clients see."""

import asyncio
import json

import pytest
from aiohttp import web
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import until
from octavo_testing.raw_http import RawConnection
from octavo_testing.routing import routing
from octavo_testing.server import parse_metrics

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
#: Longer than any test: a request that is held at all would end the test by its timeout.
FOREVER = {"max_hold_time": 1e6}
AT_ONCE = {"max_hold_time": 0.05}


def body(model="asleep"):
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "services.json"

    def write(**fields):
        path.write_text(json.dumps({"services": [{"name": "asleep", "models": ["asleep"], **fields}]}))
        return path

    return write


@pytest.fixture
async def replica():
    fake = FakeReplica()
    await fake.start()
    yield fake
    await fake.stop()


def answer(status):
    async def respond(_):
        return web.json_response({}, status=status)

    return respond


async def ended_waits(routed):
    found = parse_metrics((await routed.http.get("/metrics")).text)
    return {name: value for name, value in found.items() if name.startswith("octavo_router_queue_seconds_count")}


@pytest.mark.parametrize(
    ("fields", "after"), [({"sleeps": True, "wakeSeconds": 12.2}, "13"), ({"wakeSeconds": 3}, "3"), ({}, "1")]
)
async def test_an_expired_hold_names_the_last_wake(file, fields, after):
    async with routing(services_file=file(**fields), forward=AT_ONCE) as routed:
        expired = await routed.http.post(CHAT, json=body())
        assert (expired.status_code, expired.headers["retry-after"]) == (503, after)
        assert ("scaled to zero" in expired.json()["error"]["message"]) is bool(fields.get("sleeps"))


async def test_a_queue_before_full_replicas_does_not_name_the_wake(file, tmp_path, replica):
    go_on = asyncio.Event()

    async def block(_):
        await go_on.wait()
        return web.json_response({})

    replica.answers[CHAT] = block
    path = tmp_path / "busy.json"
    path.write_text(json.dumps({"services": [{"name": "busy", "models": [MODEL], "wakeSeconds": 40}]}))
    limits = {"max_requests_per_replica": 1, **AT_ONCE}
    async with routing(replica.url, services_file=path, forward=limits) as routed:
        await routed.routable(MODEL, 1)
        first = asyncio.create_task(routed.http.post(CHAT, json=body(MODEL)))
        await until(lambda: CHAT in replica.paths)
        assert (await routed.http.post(CHAT, json=body(MODEL))).headers["retry-after"] == "1"
        go_on.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize(("router_s", "service_s"), [(1e6, 0.05), (0.05, 1e6)])
async def test_the_shorter_limit_of_router_and_service_ends_a_hold(file, router_s, service_s):
    async with routing(services_file=file(holdSeconds=service_s), forward={"max_hold_time": router_s}) as routed:
        assert (await routed.http.post(CHAT, json=body())).status_code == 503


async def test_the_hold_counts_from_the_first_byte_of_the_request(file):
    """The client's and proxies' limits count from there, too: a slow upload must not be followed by a whole hold."""
    content = json.dumps(body()).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(content))
    async with routing(services_file=file(), forward={"max_hold_time": 3600.0}) as routed:
        router, server = routed.router, routed.server
        async with await RawConnection.open(int(routed.url.rpartition(":")[2])) as client:
            await client.send(head[:10])
            await until(lambda: any(connection._is_in_head for connection in server.server_state.connections))
            in_head_s = asyncio.get_running_loop().time()
            await client.send(head[10:] + content[:10])
            await until(lambda: len(router.in_flight) == 1)
            (request,) = router.in_flight._open
            assert request.begun_s <= in_head_s
            request.begun_s -= 3600.0  # as if the upload had taken an hour
            await client.send(content[10:])
            (expired,) = await client.read_answers(1)
            assert expired.status == 503


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"json": body(), "headers": {"authorization": "Bearer wrong"}}, 401),
        ({"json": body("unknown")}, 404),
        ({"content": b"{"}, 400),
        ({"content": b"[]"}, 400),
        ({"content": b'{"model": 1}'}, 400),
        ({"content": b'{"model": "asleep", ' + b'"a": [' * 5000}, 400),
    ],
    ids=["wrong key", "unknown model", "no JSON", "no object", "no name", "nested deeply"],
)
async def test_a_refused_request_is_never_held_or_counted(file, sent, status):
    async with routing(services_file=file(sleeps=True), forward=FOREVER, api_key=("key",)) as routed:
        routed.http.headers["authorization"] = "Bearer key"
        assert (await routed.http.post(CHAT, **sent)).status_code == status
        assert await ended_waits(routed) == {}
        assert routed.router.telemetry.num_requests == {}


async def test_a_request_without_a_model_wakes_the_only_service(file):
    async with routing(services_file=file(sleeps=True), forward=FOREVER) as routed:
        asking = asyncio.create_task(routed.http.post(CHAT, json={"messages": []}))
        await until(lambda: routed.router.queue.num_by_model() == {"asleep": 1})
        asking.cancel()
        await until(lambda: routed.router.queue.num_by_model() == {})


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_a_client_that_leaves_is_neither_held_nor_counted(file, path):
    async with routing(services_file=file(sleeps=True), forward=FOREVER) as routed:
        asking = asyncio.create_task(routed.http.post(path, json=body()))
        await until(lambda: routed.router.queue.num_by_model() == {"asleep": 1})
        metrics = parse_metrics((await routed.http.get("/metrics")).text)
        assert metrics['octavo_router_held_requests{model="asleep"}'] == 1
        asking.cancel()
        await until(lambda: routed.router.queue.num_by_model() == {} and not routed.router.lifecycle.num_requests)
        assert routed.router.telemetry.num_requests == {}


async def test_the_list_of_models_names_a_sleeping_one_without_a_wake(file):
    async with routing(services_file=file(sleeps=True), forward=FOREVER) as routed:
        assert [model["id"] for model in (await routed.http.get("/v1/models")).json()["data"]] == ["asleep"]
        assert (await routed.http.get("/v1/models/asleep")).json()["id"] == "asleep"
        assert (await routed.http.get("/v1/models/unknown")).status_code == 404
        for path in ("/health", "/metrics", "/ready"):
            assert (await routed.http.get(path)).status_code == 200
        assert await ended_waits(routed) == {}
        assert routed.router.telemetry.num_requests == {}


@pytest.mark.parametrize(
    ("status", "counts"), [(200, 1), (500, 1), (429, 1), (400, 0), (401, 0), (403, 0), (404, 0), (422, 0)]
)
async def test_a_request_that_a_replica_refuses_is_not_counted(replica, status, counts):
    replica.answers[CHAT] = answer(status)
    async with routing(replica.url) as routed:
        await routed.routable(MODEL, 1)
        assert (await routed.http.post(CHAT, json=body(MODEL))).status_code == status
        await until(lambda: not routed.router.lifecycle.num_requests)
        assert routed.router.telemetry.num_requests[MODEL] == counts
