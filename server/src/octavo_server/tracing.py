"""OpenTelemetry spans of requests, created when a request has ended; imported only if --otlp-traces-endpoint is given.

`llm_request` spans from arrival to end. Its children `queue`, `prefill` and `decode` have the durations that the engine
core measured, placed so that the prefill ends at the first token. Names and attributes are vLLM's.
"""

import os
import time
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from octavo_engine.wire.errors import StartupError
from opentelemetry.context import attach, detach
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.request_metrics import RequestSummary

TRACE_HEADERS = ("traceparent", "tracestate")
DEFAULT_PATH = "/v1/traces"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
Attributes = dict[str, str | int | float | list[str]]


class RequestTracer:
    """Exports the spans of ended requests; `shutdown` exports those that are still buffered."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("octavo_server")
        self._model_name = model_name

    def record(self, summary: RequestSummary, now: float) -> None:
        """Record a request that ended at `now`. Its span's parent is the `traceparent` of the HTTP request, if any."""
        wall_offset_s = time.time() - time.monotonic()

        def at(monotonic_s: float) -> int:
            """Convert to wall time in nanoseconds, clamped to the time from the request's arrival to its end."""
            return int((wall_offset_s + min(max(monotonic_s, summary.arrival_s), now)) * 1e9)

        span = self._tracer.start_span("llm_request", kind=SpanKind.SERVER, start_time=at(summary.arrival_s))
        span.set_attributes(self._attributes(summary, now))
        if "error" in summary.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        if summary.timing is not None and summary.first_token_s is not None:
            first, timing = summary.first_token_s, summary.timing
            scheduled = first - timing.prefill_s
            self._child(span, "queue", at(scheduled - timing.queue_s), at(scheduled))
            self._child(span, "prefill", at(scheduled), at(first))
            self._child(span, "decode", at(first), at(first + timing.decode_s))
        span.end(at(now))

    def shutdown(self) -> None:
        self._provider.shutdown()

    def _child(self, parent: Span, name: str, start_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, set_span_in_context(parent), start_time=start_ns).end(end_ns)

    def _attributes(self, summary: RequestSummary, now: float) -> Attributes:
        params, timing = summary.params, summary.timing
        attributes: Attributes = {
            "gen_ai.request.id": summary.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.response.finish_reasons": list(summary.finish_reasons),
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": summary.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": summary.num_generated,
            "gen_ai.latency.e2e": now - summary.arrival_s,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if summary.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = summary.first_token_s - summary.arrival_s
        if timing is not None:
            attributes["gen_ai.latency.time_in_queue"] = timing.queue_s
            attributes["gen_ai.latency.time_in_model_prefill"] = timing.prefill_s
            attributes["gen_ai.latency.time_in_model_decode"] = timing.decode_s
            attributes["gen_ai.latency.time_in_model_inference"] = timing.inference_s
        return attributes


class TraceContextMiddleware:
    """Pure ASGI: makes the `traceparent` of a request the parent of the spans recorded while that request is served."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = attach(self._propagator.extract(carrier_of(scope.get("headers", ()))))
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)


def carrier_of(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The trace headers (`TRACE_HEADERS`) among `headers`, decoded to text."""
    by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return {name: by_name[name] for name in TRACE_HEADERS if name in by_name}


def otlp_provider(endpoint: str) -> TracerProvider:
    """Return a provider whose thread exports spans to `endpoint` in batches. Raises StartupError for a bad endpoint."""
    provider = TracerProvider(resource=service_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=validate_endpoint(endpoint))))
    return provider


def validate_endpoint(endpoint: str) -> str:
    """Return the endpoint, with /v1/traces if it has no path. Raises StartupError for an invalid URL, or if one of
    `PROTOCOL_VARIABLES` demands a protocol other than http/protobuf."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise StartupError(
            f"--otlp-traces-endpoint: {endpoint!r} is invalid: expected a URL such as http://collector:4318/v1/traces."
        )
    for name in PROTOCOL_VARIABLES:
        protocol = os.environ.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise StartupError(
                f"{name}={protocol}: only http/protobuf is supported: unset the variable and use port 4318."
            )
    return urlunsplit(url._replace(path=DEFAULT_PATH)) if url.path in ("", "/") else endpoint


def service_resource() -> Resource:
    """OpenTelemetry resource with the service name of OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES, else `octavo`."""
    resource = Resource.create()
    is_named = not str(resource.attributes["service.name"]).startswith("unknown_service")
    return resource if is_named else resource.merge(Resource({"service.name": "octavo"}))
