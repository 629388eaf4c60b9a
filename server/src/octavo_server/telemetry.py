"""Prometheus metrics of one replica, built from the list in `octavo_engine.wire.metrics`.

There are two sources: observations of the front end for each request (latencies, sizes, finish reasons), and the engine
core's running totals, which are read at each scrape. Each duration is measured by one process's monotonic clock. The
text of a family is kept until its samples change, so that frequent scrapes do not delay the streams of this process.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.metrics import COMMON_LABELS, Feature, active_metrics
from octavo_engine.wire.records import BlockLife, EngineStats
from octavo_engine.wire.sleep import MemoryTag
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo_server.engine_metrics import EngineCollector, HistogramCollector, Samples, cache_labels, engine_samples
from octavo_server.http_metrics import HttpMetrics
from octavo_server.request_metrics import RequestMetrics, RequestSummary, RequestUsage, TenantTotals

if TYPE_CHECKING:
    from octavo_engine.frontend.adapter_names import NamedAdapter
    from octavo_engine.wire.sampling import SamplingParams

ENGINE_INDEX = "0"


class Telemetry:
    def __init__(
        self,
        *,
        model_name: str,
        config: EngineConfig,
        ready: ReadyInfo,
        stats: Callable[[], EngineStats],
        sleeping: Callable[[], frozenset[MemoryTag]],
        adapters: "Callable[[], Mapping[str, NamedAdapter]]",
        prefix: str,
    ) -> None:
        common = dict(zip(COMMON_LABELS, (model_name, ENGINE_INDEX), strict=True))
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.rejections = 0
        self.tenants = TenantTotals(common)
        self.on_request_end: Callable[[RequestSummary, float], None] | None = None
        self._stats = stats
        self._sleeping = sleeping
        self._adapters, self._max_loras = adapters, config.max_loras
        self._adapters_in_use: tuple[list[str], list[str]] = ([], [])  # hashes: running and waiting
        self._adapters_changed_s = time.time()
        self._cache_labels, self._startup_s = cache_labels(config, ready), ready.startup_s
        self._memory_bytes: dict[MemoryTag, int] = {"weights": ready.weights_bytes, "kv_cache": ready.kv_bytes}
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        features = _features(config)
        registry.register(EngineCollector(common, prefix, self._samples, features))
        self._histograms = {
            metric.name: HistogramCollector(metric, common, prefix, metric.bounds(ready.max_model_len))
            for metric in active_metrics(features)
            if metric.kind == "histogram"
        }
        for histogram in self._histograms.values():
            registry.register(histogram)
        self._texts: dict[str, tuple[Metric, bytes]] = {}
        self.http = HttpMetrics(registry)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self._num_steps = 0

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name].observe(value, times)

    def count_end(self, reason: str) -> None:
        self.finished[reason] += 1

    def request_ended(self, summary: RequestSummary, now: float) -> None:
        """Pass the totals of an ended prompt, successful or not, to `on_request_end`."""
        if self.on_request_end is not None:
            self.on_request_end(summary, now)

    def record_step(self, stats: EngineStats) -> None:
        """Add the figures of a message. A message that reports only an abort repeats the latest step, which is not
        observed again."""
        self.tenants.add_usage(stats.tenants)
        self._record_adapters(stats.running_adapters, stats.waiting_adapters)
        if stats.steps != self._num_steps:
            self._num_steps = stats.steps
            self.observe("iteration_tokens_total", stats.batched_tokens)
            self.observe("step_seconds", stats.step_s)

    def record_block_lives(self, lives: "list[BlockLife]") -> None:
        for life in lives:
            self.observe("kv_block_lifetime_seconds", life.lifetime_s)
            self.observe("kv_block_idle_before_evict_seconds", life.idle_s)
            for gap_s in life.reuse_gaps_s:
                self.observe("kv_block_reuse_gap_seconds", gap_s)

    def exposition(self) -> bytes:
        return b"".join(map(self._family_text, self._registry.collect())) + self.tenants.text().encode()

    def _family_text(self, family: Metric) -> bytes:
        kept = self._texts.get(family.name)
        if kept is None or kept[0] != family:
            kept = self._texts[family.name] = family, generate_latest(_OneFamily(family))
        return kept[1]

    def _samples(self) -> Samples:
        sleeping = self._sleeping()
        samples = engine_samples(self._stats(), self._cache_labels, sleeping)
        samples["memory_bytes"] = [((tag,), 0 if tag in sleeping else n) for tag, n in self._memory_bytes.items()]
        samples["request_success"] = [((reason,), count) for reason, count in self.finished.items()]
        samples["admission_rejections"] = [((), self.rejections)]
        samples["lora_requests_info"] = [(self._adapter_labels(), self._adapters_changed_s)]
        samples["startup_seconds"] = [((phase,), seconds) for phase, seconds in self._startup_s.items()]
        return samples

    def _record_adapters(self, running: list[str], waiting: list[str]) -> None:
        if (running, waiting) != self._adapters_in_use:
            self._adapters_in_use, self._adapters_changed_s = (running, waiting), time.time()

    def _adapter_labels(self) -> tuple[str, ...]:
        """Label values of the metric `lora_requests_info`: the limit, and the names of waiting and running adapters."""
        running, waiting = self._adapters_in_use
        named = self._adapters().items()
        names = (sorted(name for name, adapter in named if adapter.hash in hashes) for hashes in (waiting, running))
        return str(self._max_loras), *(",".join(labels) for labels in names)

    def count_rejection(self) -> None:
        self.rejections += 1

    def track_request(
        self, request_id: str, usage: RequestUsage, *, num_prompt_tokens: int, params: "SamplingParams"
    ) -> RequestMetrics:
        summary = RequestSummary(
            request_id=request_id, params=params, arrival_s=usage.arrival_s, num_prompt_tokens=num_prompt_tokens
        )
        return RequestMetrics(summary, usage, self)


@dataclass(frozen=True, slots=True)
class _OneFamily(Collector):
    family: Metric

    def collect(self) -> list[Metric]:
        return [self.family]


def _features(config: EngineConfig) -> frozenset[Feature]:
    enabled: dict[Feature, bool] = {
        "kv_cache_metrics": config.kv_cache_metrics,
        "lora": config.enable_lora,
        "spec_decode": config.speculative_config is not None,
    }
    return frozenset(feature for feature, is_on in enabled.items() if is_on)
