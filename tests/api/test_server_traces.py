import asyncio
import subprocess
import sys

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.tracers import tracer_of
from octavo_server.config import ServerConfig
from octavo_server.tracing import RequestTracer, service_resource, validate_endpoint
from octavo_testing.collector import collecting, spans_of
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 5, "temperature": 0.5}


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
async def served(tmp_path, exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, MODEL)
    async with serving(ScriptedClient(write_byte_model(tmp_path)), tracer) as started:
        yield started
    tracer.shutdown()


def spans_by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_request_is_a_span_of_the_callers_trace_with_its_phases(served, exporter, stream):
    headers = {**SAMPLED, "X-Request-Id": "mine"}
    await served.http.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
    spans = spans_by_name(exporter)
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    request = spans.pop("llm_request")
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == CALLER
    assert request.kind == SpanKind.SERVER
    for span in spans.values():
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    expected = {
        "gen_ai.request.id": "cmpl-mine",
        "gen_ai.response.model": MODEL,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.latency.time_in_queue": 0.1,
        "gen_ai.latency.time_in_model_prefill": 0.2,
        "gen_ai.latency.time_in_model_decode": 0.3,
        "gen_ai.latency.time_in_model_inference": 0.5,
    }
    measured = {"gen_ai.latency.e2e", "gen_ai.latency.time_to_first_token"}
    assert request.attributes.keys() == expected.keys() | measured
    assert {name: request.attributes[name] for name in expected} == expected
    assert all(request.attributes[name] > 0 for name in measured)


async def test_request_without_a_traceparent_starts_its_own_trace(served, exporter):
    for _ in range(2):
        await served.http.post("/v1/completions", json=BODY)
    requests = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    assert [span.parent for span in requests] == [None, None]
    assert len({span.context.trace_id for span in requests}) == 2


async def test_unsampled_trace_of_the_caller_is_not_recorded(served, exporter):
    await served.http.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE_ID}-{CALLER}-00"})
    assert spans_by_name(exporter) == {}


async def test_failed_and_aborted_requests_end_their_spans(served, exporter):
    served.engine.fail_at = 2
    await served.http.post("/v1/completions", json=BODY)
    failed = spans_by_name(exporter)["llm_request"]
    assert (failed.status.status_code.name, failed.attributes["gen_ai.response.finish_reasons"]) == (
        "ERROR",
        ("error",),
    )
    exporter.clear()
    served.engine.reset()
    served.engine.hold_at = 2
    async with served.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}):
        await served.engine.held.wait()
    while "llm_request" not in spans_by_name(exporter):
        await asyncio.sleep(0.01)
    left = spans_by_name(exporter)["llm_request"]
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert left.attributes["gen_ai.usage.completion_tokens"] == 2


async def test_spans_reach_a_collector(tmp_path):
    with collecting() as (address, received):
        tracer = tracer_of(ServerConfig(served_model_names=(MODEL,), otlp_traces_endpoint=address))
        async with serving(ScriptedClient(write_byte_model(tmp_path)), tracer) as served:
            await served.http.post("/v1/completions", json=BODY, headers=SAMPLED)
        await asyncio.to_thread(tracer.shutdown)
    assert {path for path, _ in received} == {"/v1/traces"}
    (resource,) = (r for _, request in received for r in request.resource_spans)
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "octavo"
    assert set(spans_of(received)) == {(name, TRACE_ID) for name in ("llm_request", "queue", "prefill", "decode")}


def test_missing_package_is_named_with_its_installation_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "octavo_server.tracing")
    with pytest.raises(StartupError, match=r"pip install 'octavo-server\[otel\]'"):
        tracer_of(ServerConfig(served_model_names=(MODEL,), otlp_traces_endpoint="http://x:4318"))


@pytest.mark.parametrize("command", ["serve", "route"])
def test_sdk_is_not_loaded_without_the_flag(command):
    code = f"import sys, octavo_server.cli.{command}; assert 'opentelemetry.sdk' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://", "nonsense"])
def test_endpoint_that_is_not_an_http_url_is_rejected(endpoint):
    with pytest.raises(StartupError, match="--otlp-traces-endpoint"):
        validate_endpoint(endpoint)


def test_only_the_http_protocol_is_accepted(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(StartupError, match="http/protobuf"):
        validate_endpoint("http://x:4318")


def test_service_name_comes_from_the_environment(monkeypatch):
    assert service_resource().attributes["service.name"] == "octavo"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-in-europe")
    assert service_resource().attributes["service.name"] == "chat-in-europe"


def test_custom_path_of_the_endpoint_is_kept():
    assert validate_endpoint("http://x:4318") == "http://x:4318/v1/traces"
    assert validate_endpoint("https://x/custom") == "https://x/custom"
