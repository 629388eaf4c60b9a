"""Sleep mode over HTTP: `/sleep`, `/wake_up`, `/is_sleeping`."""

import asyncio

import pytest
from octavo_engine.wire.errors import Unavailable
from octavo_testing.routing import routing
from octavo_testing.scripted import KV_BYTES, WEIGHTS_BYTES, write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

TEXT = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 3}
AWAKE = (1.0, 0.0, 0.0)


@pytest.fixture
def engine(tmp_path):
    return ScriptedClient(write_byte_model(tmp_path), enable_sleep_mode=True)


@pytest.fixture
async def served(engine):
    async with serving(engine, drain_timeout=60.0) as started:
        yield started


async def post(served, path):
    return (await served.http.post(path)).status_code


async def is_sleeping(served):
    return (await served.http.get("/is_sleeping")).json() == {"is_sleeping": True}


async def sleep_states(served):
    metrics = await served.metrics()
    names = ("awake", "weights_offloaded", "discard_all")
    return tuple(metrics[f'vllm:engine_sleep_state{{sleep_state="{name}"}}'] for name in names)


async def memory_bytes(served):
    metrics = await served.metrics()
    return tuple(metrics[f'octavo:memory_bytes{{tag="{tag}"}}'] for tag in ("weights", "kv_cache"))


async def start_request(served, **body):
    """Start a request; return when the engine holds it after its first token."""
    served.engine.hold_at = 1
    served.engine.held.clear()
    sending = asyncio.create_task(served.http.post(TEXT, json=BODY | body))
    await served.engine.held.wait()
    return sending


async def test_a_server_sleeps_and_wakes_as_vllms_test_expects(served):
    assert await post(served, "/sleep?level=1") == 200
    assert (await is_sleeping(served), await sleep_states(served)) == (True, (0.0, 1.0, 0.0))
    assert await post(served, "/wake_up") == 200
    assert (await is_sleeping(served), await sleep_states(served)) == (False, AWAKE)
    assert await post(served, "/sleep?level=2") == 200
    assert await sleep_states(served) == (0.0, 0.0, 1.0)
    assert await post(served, "/wake_up?tags=weights") == 200
    assert await is_sleeping(served)
    assert await post(served, "/wake_up?tags=kv_cache") == 200
    assert (await is_sleeping(served), await sleep_states(served)) == (False, AWAKE)


async def test_the_metrics_give_the_memory_that_the_engine_holds(served):
    held = WEIGHTS_BYTES, KV_BYTES
    assert await memory_bytes(served) == held
    await post(served, "/sleep?level=1")
    assert await memory_bytes(served) == (WEIGHTS_BYTES, 0)
    await post(served, "/wake_up")
    await post(served, "/sleep?level=2")
    assert await memory_bytes(served) == (0, 0)
    await post(served, "/wake_up")
    assert await memory_bytes(served) == held


async def test_a_sleeping_server_refuses_requests_is_alive_and_not_ready(served):
    await post(served, "/sleep")
    refused = await served.http.post(TEXT, json=BODY)
    assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)
    assert "/wake_up" in refused.json()["error"]["message"]
    ready = await served.http.get("/ready")
    assert (ready.status_code, ready.json()["ready"], ready.json()["state"]) == (503, False, "sleeping")
    for path in ("/health", "/metrics", "/load"):
        assert (await served.http.get(path)).status_code == 200
    assert not served.server._context.kv._load.accepts
    await post(served, "/wake_up")
    assert served.server._context.kv._load.accepts
    assert (await served.http.get("/ready")).json()["state"] == "accepting"
    assert (await served.http.post(TEXT, json=BODY)).status_code == 200


async def test_mode_abort_ends_running_requests(served):
    plain = await start_request(served)
    stream = await start_request(served, stream=True)
    assert await post(served, "/sleep") == 200
    assert (await plain).status_code == 503
    assert (await stream).text.count("went to sleep") == 1
    assert served.engine.running == set()
    served.engine.hold_at = None
    await post(served, "/wake_up")
    assert (await served.http.post(TEXT, json=BODY)).status_code == 200


async def test_mode_wait_lets_running_requests_finish(served):
    running = await start_request(served)
    sleeping = asyncio.create_task(post(served, "/sleep?mode=wait"))
    while (await served.http.get("/ready")).json()["state"] != "sleeping":
        await asyncio.sleep(0)
    assert (await served.http.post(TEXT, json=BODY)).status_code == 503
    assert not sleeping.done()
    assert not await is_sleeping(served)
    served.engine.resumed.set()
    assert ((await running).status_code, await sleeping) == (200, 200)
    assert await is_sleeping(served)


async def test_waking_cancels_a_sleep_that_waits(served):
    running = await start_request(served)
    sleeping = asyncio.create_task(post(served, "/sleep?mode=wait"))
    while (await served.http.get("/ready")).json()["state"] != "sleeping":
        await asyncio.sleep(0)
    assert (await post(served, "/wake_up"), await sleeping) == (200, 409)
    assert (await served.http.get("/ready")).json()["state"] == "accepting"
    served.engine.resumed.set()
    assert (await running).status_code == 200


async def test_mode_abort_ends_the_requests_that_another_sleep_waits_for(served):
    running = await start_request(served)
    sleeping = asyncio.create_task(post(served, "/sleep?mode=wait"))
    while (await served.http.get("/ready")).json()["state"] != "sleeping":
        await asyncio.sleep(0)
    assert (await post(served, "/sleep?level=2"), await sleeping, (await running).status_code) == (200, 200, 503)
    assert served.engine.sleeping_tags == {"weights", "kv_cache"}


async def test_repeated_calls_succeed_and_wrong_ones_name_the_field(served):
    assert await post(served, "/wake_up") == 200
    assert [await post(served, "/sleep") for _ in range(2)] == [200, 200]
    for query, param in (("level=0", "level"), ("level=x", "level"), ("mode=keep", "mode")):
        refused = await served.http.post(f"/sleep?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    refused = await served.http.post("/wake_up?tags=scheduling")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tags")


async def test_a_failed_wake_up_is_reported_and_the_server_still_sleeps(served):
    await post(served, "/sleep?level=2")
    served.engine.wake_error = Unavailable("weights could not be restored", retry_after_s=5.0)
    failed = await served.http.post("/wake_up")
    assert (failed.status_code, await is_sleeping(served)) == (503, True)
    assert "could not be restored" in failed.json()["error"]["message"]
    assert (await served.http.get("/ready")).json()["state"] == "sleeping"
    served.engine.wake_error = None
    assert await post(served, "/wake_up") == 200


async def test_a_drain_ends_in_the_sleep_in_which_it_began(served):
    await post(served, "/sleep")
    assert (await served.http.post("/drain")).json()["state"] == "draining"
    assert (await served.http.delete("/drain")).json()["state"] == "sleeping"
    assert (await served.http.post(TEXT, json=BODY)).status_code == 503
    await served.http.post("/drain")
    await post(served, "/wake_up")
    assert (await served.http.get("/ready")).json()["state"] == "draining"
    await served.http.delete("/drain")
    assert (await served.http.post(TEXT, json=BODY)).status_code == 200


async def test_a_sleeping_server_stops(served):
    await post(served, "/sleep")
    await served.stop()


async def test_a_router_sends_no_requests_to_a_sleeping_replica(served, tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as other, routing(served.url, other.url) as routed:
        await routed.routable(MODEL, 2)
        await post(served, "/sleep")
        await routed.routable(MODEL, 1)
        for _ in range(4):
            assert (await routed.http.post(TEXT, json=BODY)).status_code == 200
        assert (len(served.engine.requests), len(other.engine.requests)) == (0, 4)
        await post(served, "/wake_up")
        await routed.routable(MODEL, 2)


async def test_the_routes_are_404_without_the_flag(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            answer = await served.http.request(method, path)
            assert answer.status_code == 404
            assert "--enable-sleep-mode" in answer.json()["error"]["message"]
