"""Prometheus metrics of one replica, made from the list in `octavo_engine.wire.metrics`.

Two sources: what each request shows the front end (latencies, sizes, reasons), observed as it happens; and the engine
core's running totals, read only when somebody scrapes. All times are durations by one process's monotonic clock.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo_engine.config import EngineConfig, ReadyInfo
from octavo_engine.wire.metrics import COMMON_LABELS, active_metrics
from octavo_engine.wire.records import EngineStats
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from octavo_server.engine_totals import TotalsText, cache_labels, engine_samples
from octavo_server.exposition import Histogram, family_head, label_text
from octavo_server.http_metrics import HttpMetrics

if TYPE_CHECKING:
    from octavo_engine.outputs import CompletionOutput, RequestOutput

ENGINE_INDEX = "0"


class Telemetry:
    def __init__(
        self,
        *,
        model_name: str,
        config: EngineConfig,
        ready: ReadyInfo,
        stats: Callable[[], EngineStats],
        prefix: str,
    ) -> None:
        common = dict(zip(COMMON_LABELS, (model_name, ENGINE_INDEX), strict=True))
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.rejections = 0
        self.http = HttpMetrics()
        self._stats = stats
        self._cache_labels = cache_labels(config, ready)
        self._totals = TotalsText(common, prefix)
        self._histograms: dict[str, Histogram] = {}
        self._histogram_heads: list[tuple[str, str, Histogram]] = []
        for metric in active_metrics():
            if metric.kind == "histogram":
                names = metric.exposed_names(prefix)
                made = Histogram(names, metric.bounds(ready.max_model_len), label_text(common))
                self._histograms[metric.name] = made
                self._histogram_heads += [(name, family_head(name, "histogram", metric.help), made) for name in names]
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        self._num_steps = 0

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name].observe(value, times)

    def step(self, stats: EngineStats) -> None:
        """With each message of the engine core; one that brings no new step (an abort alone) doesn't count."""
        if stats.steps != self._num_steps:
            self._num_steps = stats.steps
            self.observe("iteration_tokens_total", stats.batched_tokens)
            self.observe("step_seconds", stats.step_s)

    def exposition(self) -> bytes:
        samples = engine_samples(self._stats(), self._cache_labels)
        samples["request_success"] = [((reason,), count) for reason, count in self.finished.items()]
        samples["admission_rejections"] = [((), self.rejections)]
        histograms = [head + histogram.text(name) for name, head, histogram in self._histogram_heads]
        process: bytes = generate_latest(self._process)
        return (self._totals.text(samples) + "".join(histograms) + self.http.text()).encode() + process

    def track(self, *, arrival_s: float, num_prompt_tokens: int, n: int, max_tokens: int | None) -> "RequestTrack":
        self.observe("request_params_n", n)
        if max_tokens is not None:
            self.observe("request_params_max_tokens", max_tokens)
        return RequestTrack(self, arrival_s, num_prompt_tokens)


class RequestTrack:
    """One prompt's life as the front end sees it. Only the first `close` counts, and none after the last output."""

    def __init__(self, telemetry: Telemetry, arrival_s: float, num_prompt_tokens: int) -> None:
        self._telemetry = telemetry
        self._arrival_s = arrival_s
        self._num_prompt_tokens = num_prompt_tokens
        self._latest_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._has_ended = False

    def output(self, output: "RequestOutput", now: float) -> None:
        if not self._latest_s:
            self._telemetry.observe("time_to_first_token_seconds", now - self._arrival_s)
        for sequence in output.outputs:
            self._advance(sequence, now)
        if output.finished:
            self._end(output, now)

    def close(self, reason: str) -> None:
        """Ended without its last output: refused, failed or abandoned."""
        if not self._has_ended:
            self._has_ended = True
            self._telemetry.finished[reason] += 1

    def _advance(self, sequence: "CompletionOutput", now: float) -> None:
        index, count = sequence.index, len(sequence.token_ids)
        latest = self._latest_s.get(index)
        if latest is None:
            self._first_s[index] = now
        elif count:
            self._telemetry.observe("inter_token_latency_seconds", (now - latest) / count, count)
        self._latest_s[index] = now
        self._num_tokens[index] = self._num_tokens.get(index, 0) + count
        if sequence.finish_reason is not None:
            self._end_sequence(sequence, now)

    def _end_sequence(self, sequence: "CompletionOutput", now: float) -> None:
        observe = self._telemetry.observe
        self._telemetry.finished[sequence.finish_reason or "error"] += 1
        observe("request_num_preemptions", sequence.num_preemptions)
        tokens = self._num_tokens[sequence.index]
        if tokens > 1:
            observe("request_time_per_output_token_seconds", (now - self._first_s[sequence.index]) / (tokens - 1))
        if (timing := sequence.timing) is not None:
            observe("request_queue_time_seconds", timing.queue_s)
            observe("request_prefill_time_seconds", timing.prefill_s)
            observe("request_decode_time_seconds", timing.decode_s)
            observe("request_inference_time_seconds", timing.inference_s)

    def _end(self, output: "RequestOutput", now: float) -> None:
        self._has_ended = True
        observe = self._telemetry.observe
        observe("e2e_request_latency_seconds", now - self._arrival_s)
        observe("request_prompt_tokens", self._num_prompt_tokens)
        observe("request_prefill_kv_computed_tokens", self._num_prompt_tokens - output.num_cached_tokens)
        observe("request_generation_tokens", sum(self._num_tokens.values()))
        observe("request_max_num_generation_tokens", max(self._num_tokens.values()))
