"""The router's OpenTelemetry spans, one for each forwarded request. Imported only with --otlp-traces-endpoint.

The span begins when the request's head has arrived, belongs to the trace of its `traceparent`, and is the parent of the
replica's span. Its attributes hold the inputs of the choice; failed attempts are span events.
"""

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo_server.router.upstream.headers import Headers
from octavo_server.tracing import TRACE_HEADERS, Attributes, carrier_of

if TYPE_CHECKING:
    from octavo_server.router.observe.decision_log import Entry

_NAMES = frozenset(name.encode() for name in TRACE_HEADERS)


class RouteSpan:
    """A span that ends at its start plus a monotonic duration, so that changes of the wall clock have no effect."""

    def __init__(self, span: Span, start_ns: int) -> None:
        self._span, self._start_ns = span, start_ns

    def record_retry(self, replica: str, reason: str) -> None:
        self._span.add_event("retried", {"octavo.replica": replica, "octavo.reason": reason})

    def end(
        self, request_id: str, model: str, entry: "Entry | None", *, code: int, reason: str, duration_s: float
    ) -> None:
        span = self._span
        attributes: Attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.request.model": model,
            "http.response.status_code": code,
            "octavo.reason": reason,
        }
        span.set_attributes(attributes | ({} if entry is None else _attributes(entry)))
        if code >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._start_ns + int(duration_s * 1e9))


class RouteTracer:
    """`shutdown` exports the remaining spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("octavo_server.router")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, headers: Headers, *, age_s: float, without: Collection[bytes], more: bytes
    ) -> tuple[RouteSpan, Collection[bytes], bytes]:
        """Begin the span of a request that arrived `age_s` ago. Return the span, the names of headers that are not
        forwarded (`without` and the trace headers), and the header lines to add (`more` and the span's).
        """
        context = self._propagator.extract(carrier_of(headers))
        start_ns = time.time_ns() - int(age_s * 1e9)
        span = self._tracer.start_span("route_request", context, kind=SpanKind.SERVER, start_time=start_ns)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        lines = "".join(f"{name}: {value}\r\n" for name, value in carrier.items())
        return RouteSpan(span, start_ns), _NAMES.union(without), more + lines.encode("latin-1")

    def shutdown(self) -> None:
        self._provider.shutdown()


def _attributes(entry: "Entry") -> Attributes:
    decision = entry.decision
    attributes: Attributes = {
        "octavo.replica": decision.chosen.name,
        "octavo.rung": decision.rung,
        "octavo.why": decision.why,
        "octavo.attempts": entry.attempt,
        "octavo.candidates": len(decision.candidates),
        "octavo.prompt_tokens": entry.num_prompt_tokens,
        "octavo.expected_tokens": decision.expected_tokens,
        "octavo.decision_s": entry.decision_s,
    }
    if decision.candidates:
        attributes["octavo.expected_ttft_s"] = decision.chosen_cost.ttft_s
    if entry.cached_tokens is not None:
        attributes["octavo.cached_tokens"] = entry.cached_tokens
    if entry.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = entry.ttft_s
    return attributes
