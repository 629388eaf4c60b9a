"""`LLM.get_metrics`: the engine's gauges and counters under vLLM's names. `octavo serve` has many more at /metrics."""

from dataclasses import dataclass

from octavo_engine.wire.metrics import DEFAULT_PREFIX
from octavo_engine.wire.records import EngineStats


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


def read_metrics(stats: EngineStats, model_name: str) -> list[MetricValue]:
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
    labels = {"model_name": model_name, "engine": "0"}
    found: list[MetricValue] = [Gauge(DEFAULT_PREFIX + name, labels, value) for name, value in gauges.items()]
    return found + [Counter(DEFAULT_PREFIX + name, labels, value) for name, value in counters.items()]
