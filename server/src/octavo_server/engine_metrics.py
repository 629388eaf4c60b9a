"""Collectors of the engine's metrics, which keep a family until its samples change.

Gauges and counters are computed from the core's running totals (`EngineStats`) at each scrape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.metrics import Feature, active_metrics
from octavo_engine.wire.metrics import Metric as EngineMetric
from octavo_engine.wire.records import EngineStats
from octavo_engine.wire.sleep import MemoryTag
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo_server.prometheus_text import Histogram

#: One sample: the values of the metric's own labels, and the number.
Sample = tuple[tuple[str, ...], float]
Samples = dict[str, list[Sample]]


class EngineCollector(Collector):
    """Exports gauges and counters without the label `tenant`. `samples`: returns current samples by metric name."""

    def __init__(
        self, common: Mapping[str, str], prefix: str, samples: Callable[[], Samples], features: frozenset[Feature]
    ) -> None:
        self._common, self._prefix, self._samples = common, prefix, samples
        totals = [metric for metric in active_metrics(features) if metric.kind != "histogram"]
        self._metrics = [metric for metric in totals if "tenant" not in metric.labels]
        self._kept: dict[str, tuple[list[Sample], list[Metric]]] = {}

    def collect(self) -> Iterator[Metric]:
        samples = self._samples()
        for metric in self._metrics:
            own = samples[metric.name]
            if metric.name not in self._kept or self._kept[metric.name][0] != own:
                self._kept[metric.name] = own, [*self._families(metric, own)]
            yield from self._kept[metric.name][1]

    def _families(self, metric: EngineMetric, samples: list[Sample]) -> Iterator[Metric]:
        family_class = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        for name in metric.exposed_names(self._prefix):
            family = family_class(name, metric.help, labels=[*self._common, *metric.labels])
            for labels, value in samples:
                family.add_metric([*self._common.values(), *labels], value)
            yield family


class HistogramCollector(Collector):
    """Exports one histogram under all its names."""

    def __init__(self, metric: EngineMetric, common: Mapping[str, str], prefix: str, bounds: Sequence[float]) -> None:
        self._names, self._help, self._common = metric.exposed_names(prefix), metric.help, common
        self._histogram = Histogram(bounds)
        self._edges = [*map(floatToGoString, bounds), "+Inf"]
        self._families: list[Metric] = []

    def observe(self, value: float, times: int) -> None:
        self._histogram.observe(value, times)
        self._families = []

    def collect(self) -> list[Metric]:
        if not self._families:
            counts, total = self._histogram.snapshot()
            buckets = [*zip(self._edges, accumulate(counts), strict=True)]
            for name in self._names:
                family = HistogramMetricFamily(name, self._help, labels=[*self._common])
                family.add_metric([*self._common.values()], buckets, total)
                self._families.append(family)
        return self._families


def engine_samples(s: EngineStats, info: tuple[str, ...], sleeping: frozenset[MemoryTag] = frozenset()) -> Samples:
    """Samples of all gauges and counters, by the metric's name. `info`: the result of `cache_labels`. `sleeping`:
    memory that the engine has given back."""
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
        "encoded_images": s.encoded_images,
        "image_encoding_seconds": s.encode_s,
        "encoder_cache_usage_perc": s.encoder_usage,
        "mm_cache_queries": s.mm_cache_queries,
        "mm_cache_hits": s.mm_cache_hits,
        "spec_decode_num_drafts": s.drafts,
        "spec_decode_num_draft_tokens": s.draft_tokens,
        "spec_decode_num_accepted_tokens": sum(s.accepted_draft_tokens),
        **dict.fromkeys(ALWAYS_ZERO, 0),
    }
    labelled: dict[str, dict[str, float]] = {
        "num_requests_waiting_by_reason": {"capacity": s.waiting - s.deferred, "deferred": s.deferred},
        "engine_sleep_state": sleep_states(sleeping),
        "prompt_tokens_by_source": {
            "local_compute": s.prompt_tokens - s.prefix_cache_hits,
            "local_cache_hit": s.prefix_cache_hits,
            "external_kv_transfer": 0,
        },
        "kv_blocks": {"free": s.free_blocks, "cached": s.cached_blocks, "in_use": s.in_use_blocks},
        "host_kv_blocks": {"used": s.host_used_blocks, "total": s.host_total_blocks},
        "preemptions_by_mode": {"swap": s.preemptions_swap, "recompute": s.preemptions_recompute},
        "spec_decode_num_accepted_tokens_per_pos": {str(i): n for i, n in enumerate(s.accepted_draft_tokens)},
        "stage_bytes": {"forward": s.stage_forward_bytes, "back": s.stage_back_bytes},
        "swapped_blocks": {"out": s.swapped_out_blocks, "in": s.swapped_in_blocks},
    }
    samples: Samples = {name: [((), value)] for name, value in plain.items()}
    samples |= {name: [((k,), v) for k, v in values.items()] for name, values in labelled.items()}
    samples["cache_config_info"] = [(info, 1)]
    return samples


def sleep_states(sleeping: frozenset[MemoryTag]) -> dict[str, float]:
    """Samples of `engine_sleep_state` by vLLM's names: weights_offloaded for sleep of level 1, discard_all for 2."""
    state = "discard_all" if "weights" in sleeping else "weights_offloaded" if sleeping else "awake"
    return {name: float(name == state) for name in ("awake", "weights_offloaded", "discard_all")}


#: Metrics of caches that this engine does not have; vLLM exposes them even without such a cache.
ALWAYS_ZERO = ("external_prefix_cache_queries", "external_prefix_cache_hits")


def cache_labels(config: EngineConfig, ready: ReadyInfo) -> tuple[str, ...]:
    """Label values of the metric `cache_config_info`, in the order of its labels."""
    return (
        str(ready.block_size),
        str(ready.num_blocks),
        str(ready.num_host_blocks),
        str(config.enable_prefix_caching),
        ready.kv_dtype,
        str(config.gpu_memory_utilization),
        str(config.swap_space),
        str(ready.num_blocks * ready.block_size),
        str(round(ready.num_blocks / -(-ready.max_model_len // ready.block_size), 2)),
    )
