"""The router's own spans: one for each forwarded request, between the caller's and the engine's."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import httpx
import pytest
from aiohttp import web
from octavo_server.router.observe.spans import RouteTracer
from octavo_testing.collector import collecting, spans_of
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.route_command import octavo_route
from octavo_testing.routing import routing
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RouteTracer(provider)
    yield tracer
    tracer.shutdown()


class Replicas:
    """`heads`: replica and headers of each received request. The first `num_refusals` requests are refused."""

    def __init__(self, *fakes):
        self.fakes = fakes
        self.heads = []
        self.num_refusals = 0
        for fake in fakes:
            fake.answers[CHAT] = partial(self._answer, fake.url)

    async def _answer(self, url, request):
        self.heads.append((url.removeprefix("http://"), request.headers))
        if len(self.heads) <= self.num_refusals:
            return web.json_response({}, status=503)
        return web.json_response({}, headers={"x-octavo-cached-tokens": "7"})

    @asynccontextmanager
    async def routed(self, tracer):
        async with routing(*(fake.url for fake in self.fakes), tracer=tracer) as routed:
            await routed.routable(MODEL, len(self.fakes))
            yield routed

    async def ask(self, tracer, **headers):
        async with self.routed(tracer) as routed:
            return await routed.http.post(CHAT, json=BODY, headers={"x-request-id": "mine", **headers})


@pytest.fixture
async def replicas():
    async with AsyncExitStack() as stack:
        fakes = [FakeReplica(), FakeReplica()]
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.stop)
        yield Replicas(*fakes)


def sampled(flag="01"):
    return {"traceparent": f"00-{TRACE_ID}-{CALLER}-{flag}", "tracestate": "vendor=1"}


async def test_the_routers_span_is_between_the_callers_and_the_engines(replicas, tracer, exporter):
    answer = await replicas.ask(tracer, **sampled())
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("route_request", SpanKind.SERVER)
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, CALLER)
    ((name, head),) = replicas.heads
    assert head.getall("traceparent") == [f"00-{TRACE_ID}-{span.context.span_id:016x}-01"]
    assert head.getall("tracestate") == ["vendor=1"]
    expected = {
        "gen_ai.request.id": "mine", "gen_ai.request.model": MODEL, "http.response.status_code": 200,
        "octavo.reason": "finished", "octavo.replica": name, "octavo.rung": answer.headers["x-octavo-rung"],
        "octavo.attempts": 1, "octavo.expected_tokens": 0, "octavo.cached_tokens": 7,
    }  # fmt: skip
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert span.attributes.keys() - expected.keys() == {
        *("gen_ai.latency.time_to_first_token", "octavo.decision_s", "octavo.expected_ttft_s"),
        *("octavo.prompt_tokens", "octavo.why", "octavo.candidates"),
    }
    assert 0 < span.attributes["gen_ai.latency.time_to_first_token"] <= (span.end_time - span.start_time) / 1e9


def test_a_span_lasts_as_long_as_its_request_even_if_the_clock_is_set(tracer, exporter, monkeypatch):
    span, _, _ = tracer.begin((), age_s=0.25, without=(), more=b"")
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    span.end("mine", MODEL, None, code=200, reason="finished", duration_s=1.5)
    (ended,) = exporter.get_finished_spans()
    assert ended.end_time - ended.start_time == 1_500_000_000


async def test_a_retry_is_a_span_event_with_its_reason(replicas, tracer, exporter):
    replicas.num_refusals = 1
    assert (await replicas.ask(tracer)).status_code == 200
    (span,) = exporter.get_finished_spans()
    assert (span.parent, span.attributes["octavo.attempts"]) == (None, 2)
    (event,) = span.events
    (first, _), (second, _) = replicas.heads
    assert span.attributes["octavo.replica"] == second
    assert (event.name, dict(event.attributes)) == ("retried", {"octavo.replica": first, "octavo.reason": "status 503"})


async def test_an_unsampled_trace_is_not_recorded_and_is_forwarded(replicas, tracer, exporter):
    await replicas.ask(tracer, **sampled("00"))
    assert exporter.get_finished_spans() == ()
    ((_, head),) = replicas.heads
    assert head["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert head["traceparent"].endswith("-00")


async def test_a_failed_request_has_an_error_span(replicas, tracer, exporter):
    replicas.num_refusals = 9
    assert (await replicas.ask(tracer)).status_code == 503
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code.name, span.attributes["http.response.status_code"]) == ("ERROR", 503)


async def test_a_client_disconnect_ends_the_span(replicas, tracer, exporter):
    asked = asyncio.Event()

    async def answer(_):
        asked.set()
        await asyncio.Event().wait()

    for fake in replicas.fakes:
        fake.answers[CHAT] = answer
    async with replicas.routed(tracer) as routed:
        asking = asyncio.create_task(routed.http.post(CHAT, json=BODY))
        await asked.wait()
        asking.cancel()
        async with asyncio.timeout(120):
            while not exporter.get_finished_spans():
                await asyncio.sleep(0.005)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["octavo.reason"] == "client left"


async def test_without_a_tracer_the_callers_trace_is_forwarded(replicas):
    await replicas.ask(None, **sampled())
    ((_, head),) = replicas.heads
    assert head["traceparent"] == sampled()["traceparent"]


async def test_a_stopping_router_exports_the_remaining_spans(replicas, tmp_path):
    named = [arg for fake in replicas.fakes for arg in ("--replica", fake.url)]
    with (
        collecting() as (address, received),
        octavo_route(tmp_path, *named, "--otlp-traces-endpoint", address) as route,
    ):
        await asyncio.to_thread(route.wait_until_exact, 2)
        async with httpx.AsyncClient() as http:
            await http.post(route.url + CHAT, json=BODY, headers=sampled())
        assert await asyncio.to_thread(route.stop) == 0
    assert spans_of(received) == [("route_request", TRACE_ID)]
