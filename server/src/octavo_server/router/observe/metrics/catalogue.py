"""The router's metrics: each name, type, label and bucket. `tests/router/router_metrics.txt` pins the exposed names."""

from dataclasses import dataclass
from typing import Literal

import msgspec

PREFIX = "octavo_router_"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DECISION_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)


Labels = tuple[str, ...]


class MetricSnapshot(msgspec.Struct):
    """Family -> its series: labels and value, or labels, bucket counts and sum."""

    counts: dict[str, list[tuple[Labels, float]]]
    histograms: dict[str, list[tuple[Labels, list[int], float]]]


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family("requests_total", "counter", "Requests that ended.", ("model", "code", "reason")),
    Family("request_duration_seconds", "histogram", "Time from a request's arrival to its end.", ("model",), _SECONDS),
    Family("ttft_seconds", "histogram", "Time from a request's arrival to its first byte.", ("model",), _SECONDS),
    Family("inflight", "gauge", "Requests that were sent to replicas and haven't ended."),
    Family("decisions_total", "counter", "Choices of a replica, by the basis of the choice.", ("rung",)),
    Family("decision_seconds", "histogram", "Time to choose a replica, without hashing the prompt.", (), _DECISION_S),
    Family("prefix_match_ratio", "histogram", "Share of a prompt that is expected to be cached.", (), _RATIOS),
    Family("prompt_tokens_total", "counter", "Prompt tokens sent to replicas, retries included."),
    Family("overlap_tokens_total", "counter", "Prompt tokens that were expected to be cached.", ("source",)),
    Family("cached_tokens_total", "counter", "Prompt tokens that replicas reported as cached."),
    Family("prediction_error_tokens_total", "counter", "Summed errors of the expected cached tokens.", ("direction",)),
    Family("queue_size", "gauge", "Requests waiting for a replica with room."),
    Family("held_requests", "gauge", "Requests waiting while their model has no replica.", ("model",)),
    Family("queue_seconds", "histogram", "Time that a request waited in the queue.", ("outcome",), _SECONDS),
    Family("retries_total", "counter", "Attempts that failed and were followed by a retry.", ("reason",)),
    Family("endpoints", "gauge", "Replicas by state.", ("state",)),
    Family("endpoints_admitted", "gauge", "Replicas that all workers may send requests to."),
    Family("endpoints_cut_off", "gauge", "Replicas with an open circuit breaker, or ejected as outliers."),
    Family("index_blocks", "gauge", "Entries of the prefix index, one for each distinct block."),
    Family("index_bytes", "gauge", "Estimated memory of the prefix index."),
    Family("index_forgotten_total", "counter", "Blocks dropped from the prefix index because it was full."),
    Family("index_divergence_ratio", "gauge", "Share of replicas with a KV stream whose index copy isn't exact."),
    Family("stream_faults_total", "counter", "KV streams that broke: a bad or missing frame, or a backlog."),
)  # fmt: skip

BY_NAME = {family.name: family for family in FAMILIES}
