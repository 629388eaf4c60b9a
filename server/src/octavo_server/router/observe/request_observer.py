"""`RequestObserver` reports the events of one request to the metrics, the decision log and the trace."""

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from octavo_server.router.observe.decision_log import DecisionLog, Entry
from octavo_server.router.observe.metrics.counters import RouterMetrics

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import Decision
    from octavo_server.router.observe.spans import RouteSpan, RouteTracer
    from octavo_server.router.prompts.prompt import Prompt
    from octavo_server.router.upstream.headers import Headers


class RouterTelemetry:
    """Of one worker."""

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
        self._epoch_s = time.time() - clock()

    def time_of(self, moment_s: float) -> float:
        """Of a moment by `clock`, in seconds since the epoch: the same whenever it is asked for."""
        return self._epoch_s + moment_s

    def observe(self, request_id: str) -> "RequestObserver":
        """When a request's head is there."""
        return RequestObserver(self, request_id)


class RequestObserver:
    """In this order: (decided, retried)*, first_byte, ended. `model`: empty until it is known to be a served one, as
    clients may name anything."""

    __slots__ = ("_entry", "_is_ended", "_num_attempts", "_span", "_started_s", "_telemetry", "model", "request_id")

    def __init__(self, telemetry: RouterTelemetry, request_id: str) -> None:
        self.request_id = request_id
        self.model = ""
        self._telemetry = telemetry
        self._started_s = telemetry.clock()
        self._entry: Entry | None = None
        self._num_attempts = 0
        self._is_ended = False
        self._span: RouteSpan | None = None

    def trace(
        self, tracer: "RouteTracer", headers: "Headers", *, without: Collection[bytes], more: bytes
    ) -> tuple[Collection[bytes], bytes]:
        """As `RouteTracer.begin`: what is left out of the headers that go on, and the lines that are added."""
        age_s = self._telemetry.clock() - self._started_s
        self._span, without, more = tracer.begin(headers, age_s=age_s, without=without, more=more)
        return without, more

    def decided(self, prompt: "Prompt", decision: "Decision", decision_s: float) -> None:
        telemetry = self._telemetry
        self._num_attempts += 1
        entry = self._entry = Entry(self.request_id, self.model, self._num_attempts, prompt, decision)
        entry.decided_s, entry.decision_s = telemetry.clock(), decision_s
        telemetry.decisions.add(entry)
        telemetry.metrics.decided(prompt, decision, decision_s)

    def retried(self, reason: str) -> None:
        """The attempt failed before its first byte; another one follows."""
        if self._entry is not None:
            self._entry.reason = reason
            self._telemetry.decisions.end(self._entry)
            if self._span is not None:
                self._span.retried(self._entry.decision.chosen.name, reason)
        self._telemetry.metrics.retried(reason)

    def first_byte(self, cached_tokens: int | None) -> None:
        """`cached_tokens`: what the engine reported in `x-octavo-cached-tokens`, None where it reports nothing."""
        ttft_s = self._telemetry.clock() - self._started_s
        self._telemetry.metrics.first_byte(self.model, ttft_s)
        entry = self._entry
        if entry is not None:
            entry.ttft_s = ttft_s
            if cached_tokens is not None:
                entry.cached_tokens = cached_tokens
                self._telemetry.metrics.reported(entry.decision.expected_tokens, cached_tokens)

    def ended(self, code: int, reason: str) -> None:
        assert not self._is_ended, "a request ended twice"
        self._is_ended = True
        duration_s = self._telemetry.clock() - self._started_s
        self._telemetry.metrics.ended(model=self.model, code=code, reason=reason, duration_s=duration_s)
        if self._entry is not None:
            self._entry.code, self._entry.reason = code, reason
            self._telemetry.decisions.end(self._entry)
        if self._span is not None:
            self._span.ended(self.request_id, self.model, self._entry, code=code, reason=reason)
