"""`RequestObserver` reports the events of one request to the metrics, the decision log and the trace."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from octavo_server.access_log import REPLICA
from octavo_server.router.observe.decision_log import DecisionLog, Entry
from octavo_server.router.observe.metrics.counters import RouterMetrics

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import Decision
    from octavo_server.router.observe.spans import RouteSpan, RouteTracer
    from octavo_server.router.prompts.prompt import Prompt
    from octavo_server.router.upstream.headers import Headers

#: Code of a request whose client left before the head of a response.
CLIENT_LEFT = 499
#: Status codes 4xx that are no fault of the request.
NO_REFUSALS = frozenset({429, CLIENT_LEFT})


class RouterTelemetry:
    def __init__(
        self,
        metrics: RouterMetrics | None = None,
        decisions: DecisionLog | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        tracer: "RouteTracer | None" = None,
    ) -> None:
        self.metrics = metrics or RouterMetrics()
        self.decisions = decisions or DecisionLog()
        self.clock = clock
        self.tracer = tracer
        self.num_requests: Counter[str] = Counter()  # by model, see `RequestObserver.record_model`
        self._epoch_s = time.time() - clock()

    def time_of(self, moment_s: float) -> float:
        """Convert a time of `clock` to seconds since the epoch. Steps of the wall clock don't change the result."""
        return self._epoch_s + moment_s

    def observe(self, request_id: str) -> "RequestObserver":
        return RequestObserver(self, request_id)


class RequestObserver:
    """Order of calls: record_model, (record_decision, record_retry)*, record_decision, record_first_byte, record_end.
    `model`: empty until it is known to be a served model, as clients may send any name.
    """

    __slots__ = (
        "_entry",
        "_is_counted",
        "_is_ended",
        "_num_attempts",
        "_span",
        "_started_s",
        "_telemetry",
        "model",
        "request_id",
    )

    def __init__(self, telemetry: RouterTelemetry, request_id: str) -> None:
        self.request_id = request_id
        self.model = ""
        self._telemetry = telemetry
        self._started_s = telemetry.clock()
        self._entry: Entry | None = None
        self._num_attempts = 0
        self._is_counted = self._is_ended = False
        self._span: RouteSpan | None = None

    def trace(
        self, tracer: "RouteTracer", headers: "Headers", *, without: Collection[bytes], more: bytes
    ) -> tuple[Collection[bytes], bytes]:
        """Begin a span. Return `without` and `more`, extended by the trace headers, as `RouteTracer.begin` does."""
        age_s = self._telemetry.clock() - self._started_s
        self._span, without, more = tracer.begin(headers, age_s=age_s, without=without, more=more)
        return without, more

    def record_model(self, model: str) -> None:
        """Record that a served model was found. The request counts for the model at its first byte, or at its end if it
        has none: a refused request, or one whose client left before a replica got it, is no use of the model.
        """
        self.model = model

    def record_decision(self, prompt: "Prompt", decision: "Decision", decision_s: float) -> None:
        telemetry = self._telemetry
        self._num_attempts += 1
        entry = self._entry = Entry(self.request_id, self.model, self._num_attempts, prompt, decision)
        entry.decided_s, entry.decision_s = telemetry.clock(), decision_s
        telemetry.decisions.add(entry)
        REPLICA.set(decision.chosen.name)
        telemetry.metrics.record_decision(prompt, decision, decision_s)

    def record_retry(self, reason: str) -> None:
        """Record that the attempt failed before the client got a byte, and that another attempt follows."""
        if self._entry is not None:
            self._entry.reason = reason
            self._telemetry.decisions.end(self._entry)
            if self._span is not None:
                self._span.record_retry(self._entry.decision.chosen.name, reason)
        self._telemetry.metrics.record_retry(reason)

    def record_first_byte(self, cached_tokens: int | None, *, status: int = 200) -> None:
        """`cached_tokens`: value of the engine's `x-octavo-cached-tokens`, None without that header."""
        self._count(status)
        ttft_s = self._telemetry.clock() - self._started_s
        self._telemetry.metrics.record_first_byte(self.model, ttft_s)
        entry = self._entry
        if entry is not None:
            entry.ttft_s = ttft_s
            if cached_tokens is not None:
                entry.cached_tokens = cached_tokens
                self._telemetry.metrics.record_cached_tokens(entry.decision.expected_tokens, cached_tokens)

    def record_end(self, code: int, reason: str) -> None:
        assert not self._is_ended, "a request ended twice"
        self._is_ended = True
        if code != CLIENT_LEFT or self._num_attempts:
            self._count(code)
        duration_s = self._telemetry.clock() - self._started_s
        self._telemetry.metrics.record_end(model=self.model, code=code, reason=reason, duration_s=duration_s)
        if self._entry is not None:
            self._entry.code, self._entry.reason = code, reason
            self._telemetry.decisions.end(self._entry)
        if self._span is not None:
            self._span.end(self.request_id, self.model, self._entry, code=code, reason=reason, duration_s=duration_s)

    def _count(self, status: int) -> None:
        if self.model and not self._is_counted and (status < 400 or status >= 500 or status in NO_REFUSALS):
            self._is_counted = True
            self._telemetry.num_requests[self.model] += 1
