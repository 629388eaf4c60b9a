"""Requests through a real router to scripted replicas: choice, response, and the cost of failures."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from octavo_server.http.cors import CorsPolicy
from octavo_server.router import app
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import until
from octavo_testing.routing import routing
from octavo_testing.server import events

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
FRAMES = [b'data: {"n": %d}\n\n' % n for n in range(3)]
DONE = b"data: [DONE]\n\n"
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


class ScriptedReplicas:
    """Fake replicas with a common answer, and a router in front of them."""

    def __init__(self, stack):
        self.stack = stack
        self.replicas = []

    async def replica(self, answer, path=CHAT, **fields):
        replica = FakeReplica(**fields)
        replica.answers[path] = answer
        await replica.start()
        self.stack.push_async_callback(replica.stop)
        self.replicas.append(replica)
        return replica

    async def route(self, **settings):
        routed = await self.stack.enter_async_context(routing(*(r.url for r in self.replicas), **settings))
        await routed.routable(MODEL, len(self.replicas))
        return routed


@pytest.fixture
async def scripted():
    async with AsyncExitStack() as stack:
        yield ScriptedReplicas(stack)


async def ok(request):
    return web.json_response({"text": "ok"}, headers={"x-octavo-cached-tokens": "7"})


def status(code, **headers):
    async def answer(request):
        return web.json_response({"error": {"message": f"my own {code}"}}, status=code, headers=headers)

    return answer


async def reset_connection(request):
    request.transport.abort()
    return web.Response()


async def start_stream(request, **headers):
    response = web.StreamResponse(headers={**STREAM, **headers})
    await response.prepare(request)
    return response


def stream_of(*data, then=None):
    async def answer(request):
        response = await start_stream(request)
        for piece in data:
            await response.write(piece)
            await asyncio.sleep(0)
        if then is not None:
            await then(request)
        return response

    return answer


async def test_a_response_is_relayed_unchanged_and_names_its_replica(scripted):
    replica = await scripted.replica(ok)
    routed = await scripted.route()
    answer = await routed.http.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()) == (200, {"text": "ok"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-octavo-replica"] == replica.url.removeprefix("http://")
    assert answer.headers["x-octavo-rung"] in ("hash", "exact")
    (entry,) = routed.router.telemetry.decisions.latest(5)
    assert (entry.cached_tokens, entry.code, entry.reason) == (7, 200, "finished")


async def test_headers_are_forwarded_except_hop_by_hop_and_router_headers(scripted):
    seen = {}

    async def answer(request):
        seen.update(request.headers)
        return web.json_response({})

    await scripted.replica(answer)
    routed = await scripted.route(api_key=("k",), router_secret=("s3cret",))
    sent = {
        "authorization": "Bearer k",
        "traceparent": "00-1-2-01",
        "x-octavo-tenant": "other",
        "x-octavo-salt": "z",
        "x-octavo-weight": "9",
        "x-octavo-max-tokens": "9",
        "x-octavo-model": "other",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "x-own": "kept",
    }
    assert (await routed.http.post(CHAT, json=BODY, headers=sent)).status_code == 200
    seen = {name.lower(): value for name, value in seen.items()}
    assert (seen["traceparent"], seen["x-own"], seen["x-octavo-secret"]) == ("00-1-2-01", "kept", "s3cret")
    assert seen["x-octavo-tenant"].startswith("key-")
    assert [name for name in seen if name.startswith("x-octavo")] == ["x-octavo-secret", "x-octavo-tenant"]
    assert seen.keys().isdisjoint({"authorization", "x-hop"})


async def test_a_large_head_in_one_segment_is_refused(scripted):
    await scripted.replica(ok)
    routed = await scripted.route()
    answer = await routed.http.post(CHAT, json=BODY, headers={"x-long": "x" * 66_000})
    assert (answer.status_code, answer.headers["connection"]) == (431, "close")
    assert (await routed.http.post(CHAT, json=BODY, headers={"x-long": "x" * 4_000})).status_code == 200


async def test_requests_without_a_key_are_refused(scripted):
    await scripted.replica(ok)
    routed = await scripted.route(api_key=("k",))
    for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic k"}):
        answer = await routed.http.post(CHAT, json=BODY, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await routed.http.get("/v1/models", headers=headers)).status_code == 401
    assert (await routed.http.post(CHAT, json=BODY, headers={"authorization": "Bearer k"})).status_code == 200


async def test_a_stream_is_relayed_byte_for_byte(scripted):
    whole = b"".join(FRAMES) + b": a comment\n\n" + DONE
    cuts = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    await scripted.replica(stream_of(*cuts))
    routed = await scripted.route()
    answer = await routed.http.post(CHAT, json=BODY)
    assert answer.content == whole
    assert answer.headers["content-type"] == STREAM["content-type"]


async def test_each_event_is_relayed_when_it_is_complete(scripted):
    go_on = asyncio.Event()

    async def answer(request):
        response = await start_stream(request)
        await response.write(FRAMES[0] + FRAMES[1][:5])
        await go_on.wait()
        await response.write(FRAMES[1][5:] + DONE)
        return response

    await scripted.replica(answer)
    routed = await scripted.route()
    async with routed.http.stream("POST", CHAT, json=BODY) as got:
        chunks = got.aiter_raw()
        assert await anext(chunks) == FRAMES[0]
        go_on.set()
        assert b"".join([chunk async for chunk in chunks]) == FRAMES[1] + DONE


@pytest.mark.parametrize("failure", [reset_connection, status(502), status(503), status(504), status(429)])
async def test_a_failure_before_the_first_byte_is_retried_elsewhere(scripted, failure):
    for _ in range(2):
        await scripted.replica(ok)
    routed = await scripted.route()
    for replica in scripted.replicas:
        for other in scripted.replicas:
            other.answers[CHAT] = ok
        replica.answers[CHAT] = failure
        for _ in range(3):
            assert (await routed.http.post(CHAT, json=BODY)).json() == {"text": "ok"}
    assert "octavo_router_retries_total{" in (await routed.http.get("/metrics")).text


async def test_500_and_400_are_relayed_without_a_retry(scripted):
    for code in (500, 400):
        for _ in range(2):
            await scripted.replica(status(code))
    routed = await scripted.route()
    answer = await routed.http.post(CHAT, json=BODY)
    assert answer.json()["error"]["message"] == f"my own {answer.status_code}"
    assert sum(replica.paths.count(CHAT) for replica in scripted.replicas) == 1


async def test_if_all_replicas_refuse_the_last_refusal_is_relayed(scripted):
    for _ in range(2):
        await scripted.replica(status(503, **{"Retry-After": "9"}))
    routed = await scripted.route()
    answer = await routed.http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
    assert answer.json()["error"]["message"] == "my own 503"
    assert [replica.paths.count(CHAT) for replica in scripted.replicas] == [1, 1]


@pytest.mark.parametrize(("max_retries", "attempts"), [(0, 1), (1, 2), (2, 2)])
async def test_a_request_lost_by_two_replicas_is_not_retried(scripted, max_retries, attempts):
    for _ in range(4):
        await scripted.replica(reset_connection)
    routed = await scripted.route(forward={"max_retries": max_retries})
    answer = await routed.http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "BadGatewayError")
    assert sum(replica.paths.count(CHAT) for replica in scripted.replicas) == attempts


async def test_refused_attempts_are_bounded(scripted):
    async def unavailable(request):
        return web.Response(status=503)

    for _ in range(5):
        await scripted.replica(unavailable)
    routed = await scripted.route(forward={"max_retries": 2})
    assert (await routed.http.post(CHAT, json=BODY)).status_code == 503
    assert sum(replica.paths.count(CHAT) for replica in scripted.replicas) == 3


async def test_a_response_that_breaks_before_its_end_is_retried(scripted):
    async def half(request):
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        return await reset_connection(request)

    for _ in range(2):
        await scripted.replica(ok)
    routed = await scripted.route()
    for replica in scripted.replicas:
        for other in scripted.replicas:
            other.answers[CHAT] = half if other is replica else ok
        assert (await routed.http.post(CHAT, json=BODY)).json() == {"text": "ok"}


async def test_a_replica_that_dies_in_mid_stream_ends_it_with_an_error_event(scripted):
    await scripted.replica(stream_of(FRAMES[0], FRAMES[1][:5], then=reset_connection))
    routed = await scripted.route()
    answer = await routed.http.post(CHAT, json=BODY)
    first, error, done = events(answer.text)
    assert (json.loads(first), done) == ({"n": 0}, "[DONE]")
    assert json.loads(error)["error"]["code"] == 502
    (entry,) = routed.router.telemetry.decisions.latest(5)
    assert (entry.code, entry.reason) == (200, "replica lost")


async def test_a_complete_stream_is_not_reported_as_broken(scripted):
    await scripted.replica(stream_of(*FRAMES, DONE, then=reset_connection))
    routed = await scripted.route()
    assert (await routed.http.post(CHAT, json=BODY)).content == b"".join(FRAMES) + DONE


async def test_the_responses_api_has_an_error_event_of_its_own(scripted):
    path, event = "/v1/responses", b'event: response.created\ndata: {"sequence_number": 4}\n\n'
    await scripted.replica(stream_of(event, then=reset_connection), path)
    routed = await scripted.route()
    answer = await routed.http.post(path, json={"model": MODEL, "input": "hi"})
    name, data = answer.text.removeprefix(event.decode()).strip().split("\n")
    assert name == "event: error"
    said = json.loads(data.removeprefix("data: "))
    assert (said["type"], said["sequence_number"], said["code"]) == ("error", 5, "server_error")


async def test_the_messages_api_has_an_error_event_of_its_own(scripted):
    path, event = "/v1/messages", b'event: message_start\ndata: {"type": "message_start"}\n\n'
    await scripted.replica(stream_of(event, then=reset_connection), path)
    routed = await scripted.route()
    answer = await routed.http.post(path, json={"model": MODEL, "max_tokens": 5, "messages": []})
    name, data = answer.text.removeprefix(event.decode()).strip().split("\n")
    assert name == "event: error"
    said = json.loads(data.removeprefix("data: "))
    assert (said["type"], said["error"]["type"]) == ("error", "api_error")


async def test_errors_of_the_messages_api_have_anthropics_form(scripted):
    await scripted.replica(never, "/v1/messages")
    routed = await scripted.route(forward={"first_byte_timeout": 0.2})
    answer = await routed.http.post("/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": []})
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")


async def never(request):
    await asyncio.Event().wait()


async def test_silence_before_a_response_ends_with_504(scripted):
    await scripted.replica(never)
    routed = await scripted.route(forward={"first_byte_timeout": 0.2})
    answer = await routed.http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "GatewayTimeoutError")


async def test_silence_within_a_stream_ends_it_with_an_error_event(scripted):
    await scripted.replica(stream_of(FRAMES[0], then=never))
    routed = await scripted.route(forward={"idle_timeout": 0.2})
    first, error, done = events((await routed.http.post(CHAT, json=BODY)).text)
    assert (json.loads(first), json.loads(error)["error"]["code"], done) == ({"n": 0}, 504, "[DONE]")


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_disconnect_aborts_the_upstream_request_at_once(scripted, is_stream):
    reached, left = asyncio.Event(), asyncio.Event()

    async def answer(request):
        response = await start_stream(request) if is_stream else None
        if response is not None:
            await response.write(FRAMES[0])
        reached.set()
        try:
            await never(request)
        finally:
            left.set()

    await scripted.replica(answer)
    routed = await scripted.route()
    asking = asyncio.create_task(routed.http.post(CHAT, json=BODY))
    await reached.wait()
    asking.cancel()
    async with asyncio.timeout(120):
        await left.wait()
    await until(lambda: not routed.router.lifecycle.num_requests)
    (entry,) = routed.router.telemetry.decisions.latest(5)
    assert (entry.code, entry.reason) == (200 if is_stream else 499, "client left")
    assert routed.router.fleet.replicas[0].num_in_flight == 0


async def test_a_request_waits_for_the_first_replica(scripted):
    replica = await scripted.replica(ok)
    await replica.kill()
    routed = await scripted.stack.enter_async_context(routing(replica.url))
    asking = asyncio.create_task(routed.http.post(CHAT, json=BODY))
    await until(lambda: len(routed.router.queue) == 1)
    assert not asking.done()
    await replica.start()
    assert (await asking).json() == {"text": "ok"}


async def test_a_request_refused_by_an_ending_replica_waits_for_the_next(scripted):
    async def end(request):
        first.publisher.set_accepts(False)
        return await status(503, Connection="close")(request)

    first, second = await scripted.replica(end), await scripted.replica(ok)
    await second.kill()
    routed = await scripted.stack.enter_async_context(routing(first.url, second.url))
    await routed.routable(MODEL, 1)
    asking = asyncio.create_task(routed.http.post(CHAT, json=BODY))
    await until(lambda: len(routed.router.queue) == 1)
    assert not asking.done()
    await second.start()
    assert (await asking).json() == {"text": "ok"}
    assert first.paths.count(CHAT) == 1


async def test_an_expired_wait_has_a_retry_after(scripted):
    replica = await scripted.replica(ok)
    await replica.kill()
    routed = await scripted.stack.enter_async_context(routing(replica.url, forward={"max_hold_time": 0.1}))
    answer = await routed.http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "--max-hold-time" in answer.json()["error"]["message"]


async def test_a_full_queue_refuses_requests(scripted):
    go_on = asyncio.Event()

    async def answer(request):
        await go_on.wait()
        return await ok(request)

    await scripted.replica(answer)
    routed = await scripted.route(forward={"max_requests_per_replica": 1, "max_queued_reqs": 2})
    asking = [asyncio.create_task(routed.http.post(CHAT, json=BODY)) for _ in range(3)]
    await until(lambda: len(routed.router.queue) == 2)
    refused = await routed.http.post(CHAT, json=BODY)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    full = "full replicas: 1 of 1, limit: 1 (--max-requests-per-replica)"
    waiting = "waiting requests: 2, limit: 2 (--max-queued-reqs). Send the request again later"
    assert f"{full}; {waiting}" in refused.json()["error"]["message"]
    go_on.set()
    assert [(await task).status_code for task in asking] == [200, 200, 200]
    assert len(routed.router.queue) == 0


LONG, SHORT = (CHAT, {"max_tokens": 128}), (CHAT, {"max_tokens": 0})
BATCH, EMBED = ("/v1/chat/completions/batch", {"messages": [[]]}), ("/v1/embeddings", {"input": "hi"})
TURNS = [(LONG, SHORT, "aabbbbaaa"), (LONG, BATCH, "aabbababa"), (BATCH, LONG, "aabababab"), (EMBED, LONG, "aabababab")]


@pytest.mark.parametrize(("first", "then", "order"), TURNS)
async def test_keys_take_turns_in_the_queue_by_the_tokens_that_they_ask_for(scripted, tmp_path, first, then, order):
    served, go_on = [], asyncio.Event()

    async def answer(request):
        served.append(request.headers["x-octavo-tenant"])
        await go_on.wait()
        return await ok(request)

    (await scripted.replica(answer)).answers |= {first[0]: answer, then[0]: answer}
    (keys := tmp_path / "keys").write_text("a: a\nb: b\n")
    (tenants := tmp_path / "tenants.yaml").write_text("default: {weight: 20}")
    settings = {"api_key_file": (keys,), "router_secret": ("s3cret",), "tenants_file": tenants}
    routed = await scripted.route(**settings, forward={"max_requests_per_replica": 1})
    asking = []
    for key, (path, fields) in [("Bearer a", first)] * 5 + [("Bearer b", then)] * 4:
        asking.append(asyncio.create_task(routed.http.post(path, json=BODY | fields, headers={"authorization": key})))
        await until(lambda: len(routed.router.queue) + len(served) == len(asking))
    go_on.set()
    await asyncio.gather(*asking)
    assert "".join(served) == order


async def test_a_client_that_leaves_the_queue_is_removed(scripted):
    await scripted.replica(never)
    routed = await scripted.route(forward={"max_requests_per_replica": 1})
    asking = [asyncio.create_task(routed.http.post(CHAT, json=BODY)) for _ in range(2)]
    await until(lambda: len(routed.router.queue) == 1)
    for task in asking:
        task.cancel()
    await until(lambda: not len(routed.router.queue) and not routed.router.lifecycle.num_requests)


async def test_a_drain_lets_streams_finish_and_refuses_new_requests(scripted):
    go_on = asyncio.Event()

    async def answer(request):
        response = await start_stream(request)
        await response.write(FRAMES[0])
        await go_on.wait()
        await response.write(DONE)
        return response

    await scripted.replica(answer)
    routed = await scripted.route()
    async with routed.http.stream("POST", CHAT, json=BODY) as got:
        chunks = got.aiter_raw()
        await anext(chunks)
        assert (await routed.http.post("/drain")).json()["running"] == 1
        refused = await routed.http.post(CHAT, json=BODY)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert (await routed.http.get("/ready")).status_code == 503
        go_on.set()
        assert b"".join([chunk async for chunk in chunks]) == DONE
    assert (await routed.http.delete("/drain")).json()["state"] == "accepting"
    assert (await routed.http.get("/ready")).status_code == 200


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(scripted):
    await scripted.replica(stream_of(FRAMES[0], then=never))
    routed = await scripted.route(drain_timeout=0.1)
    async with routed.http.stream("POST", CHAT, json=BODY) as got:
        chunks = got.aiter_text()
        first = await anext(chunks)
        await routed.http.post("/drain")
        _, error, done = events(first + "".join([chunk async for chunk in chunks]))
    assert (json.loads(error)["error"]["code"], done) == (503, "[DONE]")


async def of_two_models(scripted):
    """A router in front of replicas of two models that respond with their model's name."""

    def named(model):
        async def answer(request):
            return web.json_response({"model": model})

        return answer

    for model in ("other", MODEL):
        await scripted.replica(named(model), models=(model,))
    routed = await scripted.stack.enter_async_context(routing(*(r.url for r in scripted.replicas)))
    await until(lambda: routed.router.fleet.models() == [MODEL, "other"])
    return routed


async def test_models_are_the_union_and_other_names_are_not_found(scripted):
    routed = await of_two_models(scripted)
    listed = (await routed.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == [MODEL, "other"]
    assert all(card["max_model_len"] > 0 for card in listed)
    assert (await routed.http.post(CHAT, json={**BODY, "model": "third"})).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/tokenize",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/invocations",
    ],
)
async def test_a_get_of_a_post_route_is_405_and_not_404(scripted, path):

    routed = await of_two_models(scripted)
    answer = await routed.http.get(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "Method Not Allowed"


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
async def test_nan_in_the_body_does_not_hide_the_model(scripted, number):
    routed = await of_two_models(scripted)
    for model in (MODEL, "other"):
        body = b'{"temperature": %b, "model": "%b", "messages": []}' % (number, model.encode())
        assert (await routed.http.post(CHAT, content=body)).json() == {"model": model}


async def test_a_request_must_name_one_of_two_models(scripted):
    routed = await of_two_models(scripted)
    for body in (b'{"messages": []}', b'{"model": "other",}'):
        answer = await routed.http.post(CHAT, content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "fake, other" in answer.json()["error"]["message"]


async def test_a_slow_client_pauses_a_large_response(scripted):
    size, chunks = 8 * 2**20, []

    async def answer(request):
        response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
        await response.prepare(request)
        for _ in range(size // 2**16):
            await response.write(b"x" * 2**16)
            chunks.append(1)
        return response

    await scripted.replica(answer)
    routed = await scripted.route()
    async with routed.http.stream("POST", CHAT, json=BODY) as got:
        await until(lambda: routed.router.pools.pool(scripted.replicas[0].url).active)
        (connection,) = routed.router.pools.pool(scripted.replicas[0].url).active
        response = connection.response
        assert response is not None
        length = 0
        async for chunk in got.aiter_raw():
            assert response.num_waiting_bytes < 2 * 2**20
            length += len(chunk)
    assert length == size == 2**16 * len(chunks)


async def test_a_failing_replica_gets_no_requests_until_a_probe_succeeds(scripted):
    for _ in range(2):
        await scripted.replica(ok)
    routed = await scripted.route(forward={"breaker_failures": 2, "breaker_open_time": 60.0})
    asked = await routed.http.post(CHAT, json=BODY)
    (bad,) = [r for r in scripted.replicas if r.url.endswith(asked.headers["x-octavo-replica"])]
    bad.answers[CHAT] = reset_connection
    while routed.router.balancer.breaker_state(bad.url.removeprefix("http://")) == "closed":
        assert (await routed.http.post(CHAT, json=BODY)).status_code == 200
    num_asked = bad.paths.count(CHAT)
    for _ in range(4):
        assert (await routed.http.post(CHAT, json=BODY)).status_code == 200
    assert bad.paths.count(CHAT) == num_asked
    assert routed.router.balancer.breaker_state(bad.url.removeprefix("http://")) == "open"


async def test_a_path_prefix_is_removed(scripted):
    seen = []

    async def record(request):
        seen.append(request.raw_path)
        return await ok(request)

    await scripted.replica(record)
    routed = await scripted.route(root_path="/team")
    for path in (f"/team{CHAT}?a=1", CHAT):
        assert (await routed.http.post(path, json={"model": MODEL, "messages": []})).status_code == 200
    assert (await routed.http.get("/team/v1/models")).json()["data"][0]["id"] == MODEL
    assert (await routed.http.post(f"/teams{CHAT}", json={"model": MODEL, "messages": []})).status_code == 404
    assert seen == [f"{CHAT}?a=1", CHAT]


@pytest.mark.parametrize(
    ("settings", "allowed"), [({"api_key": ("k",)}, None), ({"cors": CorsPolicy(allowed_origins=("*",))}, "*")]
)
async def test_pages_of_allowed_origins_may_read_responses_and_errors(scripted, settings, allowed):
    await scripted.replica(ok)
    routed = await scripted.route(**settings)
    headers = {"origin": "http://page", "authorization": "Bearer k"}
    for model, status in (("other", 404), (BODY["model"], 200)):
        answer = await routed.http.post(CHAT, json={**BODY, "model": model}, headers=headers)
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, allowed)
    asks = {"origin": "http://page", "access-control-request-method": "POST"}
    assert (await routed.http.options(CHAT, headers=asks)).headers.get("access-control-allow-origin") == allowed


async def test_connections_are_reused(scripted):
    peers = set()

    async def answer(request):
        peers.add(request.transport.get_extra_info("peername"))
        return await ok(request)

    await scripted.replica(answer)
    routed = await scripted.route()
    for _ in range(5):
        assert (await routed.http.post(CHAT, json=BODY)).status_code == 200
    assert len(peers) == 1


async def test_a_stale_connection_is_no_failure_of_the_replica(scripted):
    replica = await scripted.replica(ok)
    routed = await scripted.route()
    assert (await routed.http.post(CHAT, json=BODY)).status_code == 200
    (idle,) = routed.router.pools.pool(replica.url).idle

    async def answer(request):
        if request.transport.get_extra_info("peername") == idle.transport.get_extra_info("sockname"):
            return await reset_connection(request)
        return await ok(request)

    replica.answers[CHAT] = answer
    assert (await routed.http.post(CHAT, json=BODY)).status_code == 200
    assert not routed.router.balancer.breakers


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000])
async def test_invalid_http_counts_as_a_lost_replica(scripted, answer):
    async def talk(request):
        request.transport.write(answer)
        await never(request)

    await scripted.replica(talk)
    routed = await scripted.route(forward={"max_retries": 0})
    assert (await routed.http.post(CHAT, json=BODY)).status_code == 502


async def test_a_compressed_stream_is_relayed_unchanged(scripted):
    go_on = asyncio.Event()

    async def answer(request):
        response = await start_stream(request, **{"content-encoding": "br"})
        await response.write(b"no frame")
        await go_on.wait()
        await response.write(b" at all")
        return response

    await scripted.replica(answer)
    routed = await scripted.route()
    async with routed.http.stream("POST", CHAT, json=BODY) as got:
        assert (got.headers["content-encoding"], got.headers["x-accel-buffering"]) == ("br", "no")
        chunks = got.aiter_raw()
        assert await anext(chunks) == b"no frame"
        go_on.set()
        assert b"".join([chunk async for chunk in chunks]) == b" at all"


async def test_the_first_requests_wait_for_the_first_replica(scripted):
    replica = await scripted.replica(ok)
    await replica.kill()
    routed = await scripted.stack.enter_async_context(routing(replica.url))
    listed = asyncio.create_task(routed.http.get("/v1/models"))
    asked = asyncio.create_task(routed.http.post(CHAT, json=BODY))
    await until(lambda: len(routed.router.queue) == 2)
    await replica.restart()
    assert [model["id"] for model in (await listed).json()["data"]] == [MODEL]
    assert (await asked).json() == {"text": "ok"}


async def test_a_queued_request_is_sent_as_soon_as_a_replica_has_room(scripted, monkeypatch):
    monkeypatch.setattr(app, "WAKE_EVERY_S", 60.0)
    await scripted.replica(ok)
    routed = await scripted.route(forward={"max_requests_per_replica": 1})
    answers = await asyncio.gather(*(routed.http.post(CHAT, json=BODY) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5


async def test_a_refusal_by_one_replica_is_retried_on_another(scripted):
    for code in (401, 403, 404):
        await scripted.replica(status(code))
    await scripted.replica(ok)
    routed = await scripted.route(forward={"max_retries": 3})
    for _ in range(4):
        assert (await routed.http.post(CHAT, json=BODY)).json() == {"text": "ok"}


async def test_a_refusal_by_all_replicas_is_relayed(scripted):
    for _ in range(2):
        await scripted.replica(status(403))
    routed = await scripted.route()
    assert (await routed.http.post(CHAT, json=BODY)).json()["error"]["message"] == "my own 403"
    assert not routed.router.balancer.outliers


async def test_rendering_a_response_is_forwarded(scripted):
    await scripted.replica(ok, path="/v1/responses/render")
    routed = await scripted.route()
    assert (await routed.http.post("/v1/responses/render", json={"input": "hi"})).json() == {"text": "ok"}
