"""Computes the figures of a run from its records, and those of the prefix cache from metrics of the server.

The definitions are vLLM's, so that results are comparable.
TTFT: from sending to the first chunk with content. ITL: gaps between such chunks. E2EL: from sending to the last chunk.
TPOT: (E2EL - TTFT) / (tokens - 1). Percentiles interpolate linearly. Failed requests count only in `failed`.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo_server.bench.load import RequestRecord

#: Name in --percentile-metrics -> short name, heading.
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}

_COUNTER = re.compile(r"^(?:\w+:)?prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, standard deviation and percentiles of sorted values; latencies of requests are in milliseconds."""

    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else 0.0

    @property
    def std(self) -> float:
        return statistics.pstdev(self.values) if self.values else 0.0

    def percentile(self, percent: float) -> float:
        if not self.values:
            return 0.0
        position = (len(self.values) - 1) * percent / 100
        below = math.floor(position)
        above = min(below + 1, len(self.values) - 1)
        return self.values[below] + (self.values[above] - self.values[below]) * (position - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    peak_output_tokens_per_s: float
    peak_concurrent_requests: int
    good: int | None  # number of requests within all limits of --goodput; None if it is not given
    latencies: dict[str, Distribution]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration_s

    @property
    def request_goodput(self) -> float | None:
        return None if self.good is None else self.good / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.duration_s


def figures(records: Sequence[RequestRecord], duration_s: float, goodput_ms: Mapping[str, float]) -> Figures:
    done = [record for record in records if record.error is None]
    return Figures(
        completed=len(done),
        failed=len(records) - len(done),
        duration_s=duration_s,
        input_tokens=sum(r.prompt_tokens for r in done),
        output_tokens=sum(r.output_tokens for r in done),
        peak_output_tokens_per_s=_peak_tokens(done),
        peak_concurrent_requests=_peak_requests(done),
        good=sum(_is_good(r, goodput_ms) for r in done) if goodput_ms else None,
        latencies={
            "ttft": _distribution(r.ttft_s for r in done),
            "tpot": _distribution(r.tpot_s for r in done if r.output_tokens > 1),
            "itl": _distribution(itl for r in done for itl in r.itls_s),
            "e2el": _distribution(r.latency_s for r in done),
        },
    )


def _distribution(seconds: Iterable[float]) -> Distribution:
    return Distribution(sorted(1000 * s for s in seconds))


def _is_good(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.latency_s}
    return all(1000 * values[name] <= limit for name, limit in limits_ms.items())


def _peak_tokens(done: Sequence[RequestRecord]) -> float:
    """Number of output tokens in the busiest second of the run."""
    counts: dict[int, float] = {}
    first = min((r.start_s for r in done), default=0.0)
    for record in done:
        tokens_per_chunk = record.output_tokens / (len(record.itls_s) + 1)
        now = record.start_s + record.ttft_s - first
        for gap in (0.0, *record.itls_s):
            now += gap
            counts[int(now)] = counts.get(int(now), 0.0) + tokens_per_chunk
    return max(counts.values(), default=0.0)


def _peak_requests(done: Sequence[RequestRecord]) -> int:
    """Largest number of requests in progress at once; one that ends when another starts does not overlap it."""
    changes = sorted([(r.start_s, 1) for r in done] + [(r.start_s + r.latency_s, -1) for r in done])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """Numbers of prompt tokens looked up and found in the prefix cache, since the server started or during a run."""

    queries: float
    hits: float

    def since(self, before: "PrefixCache") -> "PrefixCache":
        return PrefixCache(self.queries - before.queries, self.hits - before.hits)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


def parse_prefix_cache(metrics: str) -> PrefixCache | None:
    """Sum the prefix cache's counters of all engines in Prometheus text; None if the text has no such counters."""
    counts: dict[str, float] = {}
    for kind, value in _COUNTER.findall(metrics):
        counts[kind] = counts.get(kind, 0.0) + float(value)
    return PrefixCache(counts["queries"], counts["hits"]) if {"queries", "hits"} <= counts.keys() else None
