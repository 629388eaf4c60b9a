"""Observes the counts and times of requests, but no text, in the front end as the engine's outputs arrive.

`RequestMetrics` turns the outputs of one prompt into observations for a `MetricsSink`. `RequestSummary` holds the
totals of a prompt for a trace, `RequestUsage` the totals of a client's request, which may have several prompts, and
`TenantTotals` the totals of an API key.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_engine.wire.metrics import METRICS, Metric

from octavo_server.http.api_keys import tenant_label
from octavo_server.prometheus_text import family_text, line_start

if TYPE_CHECKING:
    from octavo_engine.frontend.outputs import CompletionOutput, RequestOutput
    from octavo_engine.wire.records import TenantUsage, Timing
    from octavo_engine.wire.sampling import SamplingParams

    from octavo_server.http.rate_limits import OwnRequest
    from octavo_server.http.tenants_file import TenantLimits

MAX_TENANTS = 1000
#: Label of the tenants beyond the first `MAX_TENANTS`. No key has such a name.
OTHER_TENANTS = "(others)"


class TenantFamily:
    """A counter by tenant and one more label. As there may be many tenants, the lines of each are cached."""

    def __init__(self, metric: Metric, common: Mapping[str, str]) -> None:
        self._name, self._help = f"{metric.full_name()}_total", metric.help
        self._labels, self._common = (*common, *metric.labels), tuple(common.values())
        self._counts: dict[str, Counter[str]] = {}
        self._lines: dict[str, str] = {}

    def add(self, tenant: str, **counts: int) -> None:
        self._counts.setdefault(tenant, Counter()).update(counts)
        self._lines[tenant] = ""

    def text(self) -> str:
        for tenant in [tenant for tenant, lines in self._lines.items() if not lines]:
            self._lines[tenant] = "".join(
                f"{line_start(self._name, self._labels, (*self._common, tenant, kind))}{count}\n"
                for kind, count in self._counts[tenant].items()
            )
        return family_text(self._name, "counter", self._help, self._lines.values())


class TenantTotals:
    """Tokens and ended requests by tenant, for the first `MAX_TENANTS` and for all others together."""

    def __init__(self, common: Mapping[str, str]) -> None:
        families = {metric.name: TenantFamily(metric, common) for metric in METRICS if "tenant" in metric.labels}
        self._tokens, self._requests = families["tenant_tokens"], families["tenant_requests"]
        self._tenants: set[str] = set()

    def add_usage(self, tenants: "Mapping[str, TenantUsage]") -> None:
        for name, usage in tenants.items():
            if usage.prompt_tokens or usage.cached_tokens or usage.generation_tokens:
                self._tokens.add(
                    self._label(name),
                    prompt=usage.prompt_tokens,
                    cached=usage.cached_tokens,
                    generated=usage.generation_tokens,
                )

    def add_request(self, name: str, reason: str) -> None:
        self._requests.add(self._label(name), **{reason: 1})

    def text(self) -> str:
        return self._tokens.text() + self._requests.text()

    def _label(self, name: str) -> str:
        label = tenant_label(name)
        if label not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return OTHER_TENANTS
        self._tenants.add(label)
        return label


@dataclass(slots=True, kw_only=True)
class RequestSummary:
    """Totals of one prompt. Times are on the front end's monotonic clock; `timing` has the durations of the sequence
    that ended last, by the engine core's clock."""

    request_id: str
    params: "SamplingParams"
    arrival_s: float
    num_prompt_tokens: int
    num_generated: int = 0
    first_token_s: float | None = None
    timing: "Timing | None" = None
    finish_reasons: list[str] = field(default_factory=list)


class UsageSink(Protocol):
    def begin_request(self, usage: "RequestUsage") -> None: ...

    def end_request(self, usage: "RequestUsage") -> None: ...


@dataclass(slots=True, kw_only=True)
class RequestUsage:
    """Totals of a client's request, which begins when the queue accepts it; a refused request has no end.

    `finish`: finish reason of the sequence that ended last, "error", or "cut" if the client left.
    """

    request_id: str
    tenant: str
    limits: "TenantLimits"
    model: str
    path: str
    arrival_s: float
    sink: UsageSink
    admitted: "OwnRequest | None" = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated: int = 0
    first_output_s: float | None = None
    finish: str = ""
    has_begun: bool = False

    def begin(self, num_prompt_tokens: int) -> None:
        """Raises RateLimited."""
        self.num_prompt_tokens = num_prompt_tokens
        self.sink.begin_request(self)
        self.has_begun = True

    def add_first_output(self, num_cached_tokens: int, now: float) -> None:
        """Record the first output of a prompt."""
        self.num_cached_tokens += num_cached_tokens
        if self.first_output_s is None:
            self.first_output_s = now

    def end(self, finish: str) -> None:
        """`finish`: empty if the response is complete."""
        if self.has_begun:
            self.has_begun, self.finish = False, finish or self.finish
            self.sink.end_request(self)


class MetricsSink(Protocol):
    def observe(self, name: str, value: float, times: int = 1) -> None: ...

    def count_end(self, reason: str) -> None: ...

    def request_ended(self, summary: RequestSummary, now: float) -> None: ...


class RequestMetrics:
    """Observes the outputs of one prompt. `close` has an effect only once, and none after the last output."""

    def __init__(self, summary: RequestSummary, usage: RequestUsage, sink: MetricsSink) -> None:
        self._summary = summary
        self._usage = usage
        self._sink = sink
        self._latest_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._has_ended = False

    def output(self, output: "RequestOutput", now: float) -> None:
        if self._summary.first_token_s is None:
            self._summary.first_token_s = now
            self._observe_first(now)
            self._usage.add_first_output(output.num_cached_tokens, now)
        for sequence in output.outputs:
            self._advance(sequence, now)
        if output.finished:
            self._end(output, now)

    def refuse(self) -> None:
        """End without an observation, for a request that was rejected."""
        self._has_ended = True

    def close(self, reason: str) -> None:
        """Record the end of a request whose last output never came, because it failed or was abandoned."""
        if not self._has_ended:
            self._has_ended = True
            self._summary.finish_reasons.append(reason)
            self._summary.num_generated = sum(self._num_tokens.values())
            self._sink.count_end(reason)
            self._sink.request_ended(self._summary, time.monotonic())

    def _observe_first(self, now: float) -> None:
        params = self._summary.params
        self._sink.observe("time_to_first_token_seconds", now - self._summary.arrival_s)
        self._sink.observe("request_params_n", params.n)
        if params.max_tokens is not None:
            self._sink.observe("request_params_max_tokens", params.max_tokens)

    def _advance(self, sequence: "CompletionOutput", now: float) -> None:
        index, count = sequence.index, len(sequence.token_ids)
        latest = self._latest_s.get(index)
        if latest is None:
            self._first_s[index] = now
        elif count:
            self._sink.observe("inter_token_latency_seconds", (now - latest) / count, count)
        self._latest_s[index] = now
        self._num_tokens[index] = self._num_tokens.get(index, 0) + count
        self._usage.num_generated += count
        if sequence.finish_reason is not None:
            self._end_sequence(sequence, now)

    def _end_sequence(self, sequence: "CompletionOutput", now: float) -> None:
        observe = self._sink.observe
        reason = sequence.finish_reason or "error"
        self._summary.finish_reasons.append(reason)
        self._usage.finish = reason
        self._sink.count_end(reason)
        observe("request_num_preemptions", sequence.num_preemptions)
        tokens = self._num_tokens[sequence.index]
        if tokens > 1:
            observe("request_time_per_output_token_seconds", (now - self._first_s[sequence.index]) / (tokens - 1))
        if (timing := sequence.timing) is not None:
            self._summary.timing = timing
            observe("request_queue_time_seconds", timing.queue_s)
            observe("request_prefill_time_seconds", timing.prefill_s)
            observe("request_decode_time_seconds", timing.decode_s)
            observe("request_inference_time_seconds", timing.inference_s)

    def _end(self, output: "RequestOutput", now: float) -> None:
        self._has_ended = True
        observe, summary = self._sink.observe, self._summary
        summary.num_generated, num_prompt = sum(self._num_tokens.values()), summary.num_prompt_tokens
        observe("e2e_request_latency_seconds", now - summary.arrival_s)
        observe("request_prompt_tokens", num_prompt)
        observe("request_prefill_kv_computed_tokens", num_prompt - output.num_cached_tokens)
        observe("request_generation_tokens", summary.num_generated)
        observe("request_max_num_generation_tokens", max(self._num_tokens.values()))
        self._sink.request_ended(summary, now)
