"""Results of `router_replicas.py`: figures of each policy, tables and verdicts on the goals."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replica_load import Outcome
from table import number, print_table

OURS, OURS_TWICE, ROUND_ROBIN, SGLANG = "octavo", "octavo x2", "round robin", "sglang"
POLICIES = (OURS, OURS_TWICE, ROUND_ROBIN, SGLANG)
GOOD_TTFT = 2.0  # times the TTFT of an idle replica without a cache
HEADER = ("policy", "hits/oracle", "TTFT mean s", "p50", "p99", "good/s", "errors", "skew", "evicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`expected_error`: Σ|expected − reported| / Σ reported cached tokens of our router's decisions."""

    policy: str
    oracle_share: float
    oracle_tokens: int
    cached_tokens: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    num_errors: int
    skew: float
    evicted_blocks: int = 0
    expected_error: float | None = None
    rungs: dict[str, int] | None = None

    def line(self) -> str:
        figures = zip(HEADER[1:], self.row()[1:], strict=True)
        return f"{self.policy}: " + ", ".join(f"{name} {value}" for name, value in figures)

    def row(self) -> tuple[str, ...]:
        times = (self.ttft_mean_s, self.ttft_p50_s, self.ttft_p99_s, self.goodput)
        counts = (str(self.num_errors), f"{self.skew:.2f}", str(self.evicted_blocks))
        return (self.policy, f"{self.oracle_share:.3f}", *map(number, times), *counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Requests per second of all replicas without a cache, and the TTFT of an idle replica in seconds."""

    rate: float
    ttft_s: float


def result_of(
    policy: str,
    outcome: Outcome,
    oracle: int,
    counts: Sequence[int],
    capacity: Capacity,
    decisions: Sequence[dict[str, Any]],
) -> Result:
    ttfts = sorted(record.ttft_s for record in outcome.finished) or [float("inf")]
    num_good = sum(ttft <= GOOD_TTFT * capacity.ttft_s for ttft in ttfts)
    result = Result(
        policy=policy,
        oracle_share=outcome.cached_tokens / oracle if oracle else 1.0,
        oracle_tokens=oracle,
        cached_tokens=outcome.cached_tokens,
        hit_rate=outcome.cached_tokens / max(1, outcome.prompt_tokens),
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p50_s=ttfts[len(ttfts) // 2],
        ttft_p99_s=ttfts[int(0.99 * (len(ttfts) - 1))],
        goodput=num_good / outcome.took_s,
        num_errors=outcome.num_errors,
        skew=max(counts) * len(counts) / max(1, sum(counts)),
    )
    return replace(result, **_predictions(decisions)) if decisions else result


def _predictions(decisions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reported = [d for d in decisions if d["cached_tokens"] is not None]
    off = sum(abs(d["expected_tokens"] - d["cached_tokens"]) for d in reported)
    return {
        "expected_error": off / max(1, sum(d["cached_tokens"] for d in reported)),
        "rungs": dict(Counter(d["rung"] for d in decisions)),
    }


Results = dict[str, dict[str, Result]]
Row = tuple[str, str, str, str]


def verdicts(results: Results) -> list[Row]:
    rows: list[Row] = []

    def judge(what: str, rule: str, value: float, is_met: Callable[[float], bool]) -> None:
        rows.append((what, rule, f"{value:.3f}", "met" if is_met(value) else "missed"))

    for name in ("multi-turn", "shared prefix"):
        if OURS not in results.get(name, {}):
            continue
        ours = results[name][OURS]
        judge(f"{name}: hits of the oracle's", ">= 0.95", ours.oracle_share, lambda x: x >= 0.95)
        for other in (ROUND_ROBIN, SGLANG):
            if other in results[name]:
                ratio = ours.ttft_mean_s / results[name][other].ttft_mean_s
                judge(f"{name}: mean TTFT / {other}", "< 1", ratio, lambda x: x < 1)
        if OURS_TWICE in results[name]:
            off = abs(results[name][OURS_TWICE].hit_rate - ours.hit_rate) / max(ours.hit_rate, 1e-9)
            judge(f"{name}: hit rate of two routers off by", "<= 0.01", off, lambda x: x <= 0.01)
    if hot := results.get("hot prefix", {}).get(OURS):
        judge("hot prefix: hits of the oracle's", ">= 0.9", hot.oracle_share, lambda x: x >= 0.9)
        judge("hot prefix: busiest / mean replica", "<= 1.3", hot.skew, lambda x: x <= 1.3)
    if pressed := results.get("eviction pressure", {}).get(OURS):
        judge("pressure: blocks evicted", "> 0", pressed.evicted_blocks, lambda x: x > 0)
        judge("pressure: reported of the oracle's", ">= 0.5", pressed.oracle_share, lambda x: x >= 0.5)
        judge("pressure: expected off by", "<= 0.01", pressed.expected_error or 0.0, lambda x: x <= 0.01)
    errors = sum(result.num_errors for of in results.values() for result in of.values())
    judge("errors, all policies", "0", errors, lambda x: x == 0)
    return rows


def report(capacity: Capacity, results: Results) -> None:
    print(f"without a cache: {capacity.rate:.2f} requests/s, first token after {capacity.ttft_s:.2f} s when idle")
    for name, of_policy in results.items():
        print_table(name, HEADER, [result.row() for result in of_policy.values()])
        for result in of_policy.values():
            if result.expected_error is not None:
                print(f"{result.policy}: expected off by {result.expected_error:.4f} of reported; rungs {result.rungs}")
    print_table("verdicts", ("", "rule", "now", ""), verdicts(results))
