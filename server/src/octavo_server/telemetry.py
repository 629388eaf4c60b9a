"""Prometheus metrics of one replica, made from the list in `octavo_engine.wire.metrics`, in a registry of its own.

Two sources: what each request shows the front end (latencies, sizes, reasons), observed as it happens; and the engine
core's running totals (`EngineStats`), read only when somebody scrapes. All times are durations by one process's
monotonic clock.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from octavo_engine.config import EngineConfig, ReadyInfo
from octavo_engine.wire.metrics import COMMON_LABELS, Metric, active_metrics
from octavo_engine.wire.records import EngineStats
from prometheus_client import GCCollector, Histogram, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

if TYPE_CHECKING:
    from octavo_engine.outputs import CompletionOutput, RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_INDEX = "0"

#: One sample: the values of the metric's own labels, and the number.
Sample = tuple[tuple[str, ...], float]


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
        self.registry = CollectorRegistry()
        self._labels = (model_name, ENGINE_INDEX)
        self._prefix = prefix
        self._histograms = {m.name: self._histogram(m, ready) for m in active_metrics() if m.kind == "histogram"}
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.rejections = 0
        info = _cache_labels(config, ready)
        self.registry.register(_Totals(self, stats, info, self._labels, prefix))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def observe(self, name: str, value: float) -> None:
        for histogram in self._histograms[name]:
            histogram.observe(value)

    def step(self, stats: EngineStats) -> None:
        """One engine step; one that computed nothing (an abort alone) doesn't count."""
        if stats.batched_tokens:
            self.observe("iteration_tokens_total", stats.batched_tokens)
            self.observe("step_seconds", stats.step_s)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def track(self, *, arrival_s: float, num_prompt_tokens: int, n: int, max_tokens: int | None) -> "RequestTrack":
        self.observe("request_params_n", n)
        if max_tokens is not None:
            self.observe("request_params_max_tokens", max_tokens)
        return RequestTrack(self, arrival_s, num_prompt_tokens)

    def _histogram(self, metric: Metric, ready: ReadyInfo) -> list[Histogram]:
        bounds = metric.bounds(ready.max_model_len)
        names = [metric.full_name(self._prefix), *(self._prefix + old for old in metric.old_names)]
        made = [Histogram(n, metric.help, COMMON_LABELS, registry=self.registry, buckets=bounds) for n in names]
        return [histogram.labels(*self._labels) for histogram in made]


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
            for _ in range(count):
                self._telemetry.observe("inter_token_latency_seconds", (now - latest) / count)
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


class _Totals(Collector):
    """Gauges and counters, read at the scrape."""

    def __init__(
        self,
        telemetry: Telemetry,
        stats: Callable[[], EngineStats],
        info: Mapping[str, str],
        labels: tuple[str, ...],
        prefix: str,
    ) -> None:
        self._telemetry = telemetry
        self._stats = stats
        self._info = info
        self._labels = labels
        self._prefix = prefix

    def collect(self) -> Iterable[Family]:
        samples = _samples(self._stats(), self._info)
        samples["request_success"] = [((reason,), count) for reason, count in self._telemetry.finished.items()]
        samples["admission_rejections"] = [((), self._telemetry.rejections)]
        for metric in active_metrics():
            if metric.kind != "histogram":
                for name in (metric.full_name(self._prefix), *(self._prefix + old for old in metric.old_names)):
                    yield self._family(name, metric, samples[metric.name])

    def _family(self, name: str, metric: Metric, samples: list[Sample]) -> Family:
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        family = kind(name, metric.help, labels=(*COMMON_LABELS, *metric.labels))
        for labels, value in samples:
            family.add_metric((*self._labels, *labels), value)
        return family


def _samples(s: EngineStats, info: Mapping[str, str]) -> dict[str, list[Sample]]:
    """By metric name. What is computed is neither cached nor fetched from elsewhere."""
    plain: dict[str, float] = {
        "num_requests_running": s.running,
        "num_requests_waiting": s.waiting,
        "kv_cache_usage_perc": s.kv_usage,
        "prefix_cache_queries": s.prefix_cache_queries,
        "prefix_cache_hits": s.prefix_cache_hits,
        "num_preemptions": s.preemptions,
        "prompt_tokens": s.prompt_tokens,
        "prompt_tokens_cached": s.prefix_cache_hits,
        "prompt_tokens_recomputed": s.recomputed_tokens,
        "generation_tokens": s.generation_tokens,
        "kv_used_slots": s.kv_used_slots,
        "dropped_blocks": s.dropped_blocks,
        "recomputed_tokens": s.recomputed_tokens,
        "cow_copies": s.cow_copies,
    }
    labelled: dict[str, dict[str, float]] = {
        "num_requests_waiting_by_reason": {"capacity": s.waiting, "deferred": 0},
        "prompt_tokens_by_source": {
            "local_compute": s.prompt_tokens - s.prefix_cache_hits,
            "local_cache_hit": s.prefix_cache_hits,
            "external_kv_transfer": 0,
        },
        "kv_blocks": {"free": s.free_blocks, "cached": s.cached_blocks, "in_use": s.in_use_blocks},
        "host_kv_blocks": {"used": s.host_used_blocks, "total": s.host_total_blocks},
        "preemptions_by_mode": {"swap": s.preemptions_swap, "recompute": s.preemptions_recompute},
        "swapped_blocks": {"out": s.swapped_out_blocks, "in": s.swapped_in_blocks},
    }
    found: dict[str, list[Sample]] = {name: [((), value)] for name, value in plain.items()}
    found |= {name: [((k,), v) for k, v in values.items()] for name, values in labelled.items()}
    found["cache_config_info"] = [(tuple(info.values()), 1)]
    return found


def _cache_labels(config: EngineConfig, ready: ReadyInfo) -> dict[str, str]:
    """In the order of the metric's labels."""
    return {
        "block_size": str(ready.block_size),
        "num_gpu_blocks": str(ready.num_blocks),
        "num_cpu_blocks": str(ready.num_host_blocks),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "cache_dtype": ready.kv_dtype,
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "swap_space": str(config.swap_space),
    }
