"""`LLM.get_metrics`: metrics of requests and steps under vLLM's names; the progress bar that shows token rates."""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from octavo_engine.frontend.output_stream import RequestAssembly
from octavo_engine.wire.metrics import DEFAULT_PREFIX, active_metrics
from octavo_engine.wire.records import EngineStats, SeqOutput

if TYPE_CHECKING:
    from octavo_engine.frontend.output_stream import RequestAssembly, SequenceAssembly


@dataclass(frozen=True, slots=True)
class MetricValue:
    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Gauge(MetricValue):
    value: float


@dataclass(frozen=True, slots=True)
class Counter(MetricValue):
    """`value`: the count since the engine's start."""

    value: int


@dataclass(frozen=True, slots=True)
class Histogram(MetricValue):
    """`buckets`: upper bound, as text up to "+Inf" -> number of observations that are at most as large."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Observations:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        up_to = [*accumulate(self._counts)]
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return Histogram(name, labels, count=up_to[-1], sum=self._sum, buckets=dict(zip(bounds, up_to, strict=True)))


class OfflineMetrics:
    """Observes the requests and steps of an `LLM`; all times are readings of one monotonic clock, in seconds."""

    def __init__(self, max_model_len: int) -> None:
        self._metrics = [metric for metric in active_metrics() if metric.kind == "histogram"]
        self._observations = {metric.name: _Observations(metric.bounds(max_model_len)) for metric in self._metrics}
        self._ended: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._latest_s: dict[str, dict[int, float]] = {}  # request id -> index of a sequence -> time
        self._num_steps = 0

    def record_step(self, stats: EngineStats) -> None:
        if stats.steps != self._num_steps:
            self._num_steps = stats.steps
            self._add("iteration_tokens_total", stats.batched_tokens)
            self._add("step_seconds", stats.step_s)

    def record_tokens(self, out: SeqOutput, now: float) -> None:
        """Observe the time since the sequence's earlier tokens. `out`: a record of a sequence that has not ended."""
        latest_s, count = self._latest_s.setdefault(out.request_id, {}), len(out.token_ids)
        if out.index in latest_s and count:
            self._add("inter_token_latency_seconds", (now - latest_s[out.index]) / count, count)
        latest_s[out.index] = now

    def record_abort(self, request_id: str) -> None:
        self._latest_s.pop(request_id, None)

    def record_end(self, assembly: "RequestAssembly", now: float) -> None:
        """Observe the totals of a request whose last token has arrived."""
        metrics, params = assembly.metrics, assembly.request.params
        lengths = [len(sequence.token_ids) for sequence in assembly.sequences]
        num_prompt = len(assembly.request.prompt_token_ids)
        self._add("request_params_n", params.n)
        if params.max_tokens is not None:
            self._add("request_params_max_tokens", params.max_tokens)
        if metrics.first_token_s is not None:
            self._add("time_to_first_token_seconds", metrics.first_token_s - metrics.arrival_s)
        self._add("e2e_request_latency_seconds", now - metrics.arrival_s)
        self._add("request_prompt_tokens", num_prompt)
        self._add("request_prefill_kv_computed_tokens", num_prompt - assembly.num_cached_tokens)
        self._add("request_generation_tokens", sum(lengths))
        self._add("request_max_num_generation_tokens", max(lengths))
        self._latest_s.pop(assembly.request.request_id, None)
        for sequence in assembly.sequences:
            self._record_sequence(sequence)

    def _record_sequence(self, sequence: "SequenceAssembly") -> None:
        self._ended[sequence.finish_reason or "error"] += 1
        self._add("request_num_preemptions", sequence.num_preemptions)
        if (timing := sequence.timing) is None:
            return
        if len(sequence.token_ids) > 1:
            self._add("request_time_per_output_token_seconds", timing.decode_s / (len(sequence.token_ids) - 1))
        self._add("request_queue_time_seconds", timing.queue_s)
        self._add("request_prefill_time_seconds", timing.prefill_s)
        self._add("request_decode_time_seconds", timing.decode_s)
        self._add("request_inference_time_seconds", timing.inference_s)

    def _add(self, name: str, value: float, times: int = 1) -> None:
        self._observations[name].add(value, times)

    def read(self, stats: EngineStats, model_name: str) -> list[MetricValue]:
        labels = {"model_name": model_name, "engine": "0"}
        metrics: list[MetricValue] = [*_totals(stats, labels)]
        for reason, count in self._ended.items():
            metrics.append(Counter(f"{DEFAULT_PREFIX}request_success", {**labels, "finished_reason": reason}, count))
        for metric in self._metrics:
            observations = self._observations[metric.name]
            metrics += [observations.histogram(name, labels) for name in metric.exposed_names()]
        return metrics


def _totals(stats: EngineStats, labels: dict[str, str]) -> list[MetricValue]:
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.kv_usage,
    }
    counters = {
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
    }
    if stats.drafts:
        counters |= {
            "spec_decode_num_drafts": stats.drafts,
            "spec_decode_num_draft_tokens": stats.draft_tokens,
            "spec_decode_num_accepted_tokens": sum(stats.accepted_draft_tokens),
        }
    metrics: list[MetricValue] = [Gauge(DEFAULT_PREFIX + name, labels, value) for name, value in gauges.items()]
    return metrics + [Counter(DEFAULT_PREFIX + name, labels, value) for name, value in counters.items()]


class ProgressBar:
    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar
        self._started_s = time.monotonic()
        self._input_tokens = 0
        self._output_tokens = 0

    def add(self, finished: RequestAssembly) -> None:
        self._input_tokens += len(finished.request.prompt_token_ids)
        self._output_tokens += sum(len(s.token_ids) for s in finished.sequences)
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        rates = (self._input_tokens / elapsed_s, self._output_tokens / elapsed_s)
        self._bar.set_postfix_str("input: {:.1f} tok/s, output: {:.1f} tok/s".format(*rates), refresh=False)
        self._bar.update(1)


@contextmanager
def progress_bar(total: int, *, enabled: bool) -> Iterator[ProgressBar]:
    with tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, disable=not enabled) as bar:
        yield ProgressBar(bar)
