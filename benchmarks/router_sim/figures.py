"""`Figures`: the results of one run.

Rates are per second of the time in which requests arrive; requests that end later are counted, too. Latencies are those
of answered requests: read them together with `errors` and `goodput`, because a policy that refuses half the requests
is fast.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median

from router_sim.hardware import Hardware
from router_sim.world import Outcome, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """`skew`: largest mean of a replica's requests in flight over the mean of all; `busy_skew`: same, step time."""

    requests: int
    offered_rate: float
    finished_rate: float
    goodput: float
    errors: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    hit_rate: float  # share of prompt tokens found in a cache
    oracle_rate: float
    skew: float
    busy_skew: float
    replica_use: float  # share of time in steps
    expected_error: float | None  # Σ|expected - found| / Σ found cached tokens; None for policies without expectations

    @property
    def hits_of_oracle(self) -> float:
        return self.hit_rate / self.oracle_rate if self.oracle_rate else 1.0


def figures(world: World) -> Figures:
    outcomes = [*world.outcomes.values()]
    answered = [o for o in outcomes if not o.is_refused]
    duration_s = max(o.arrived_s for o in outcomes)
    ttft = sorted(_ttft_s(o) for o in answered) or [0.0]
    prompt_tokens = sum(o.prompt_tokens for o in outcomes)
    cached_tokens = sum(o.cached_tokens for o in outcomes)
    return Figures(
        requests=len(outcomes),
        offered_rate=len(outcomes) / duration_s,
        finished_rate=sum((o.ended_s or 0.0) <= duration_s for o in answered) / duration_s,
        goodput=sum(is_good(o, world.views[0].hardware) for o in answered) / duration_s,
        errors=len(outcomes) - len(answered),
        ttft_mean_s=fmean(ttft),
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p99_s=_percentile(ttft, 99),
        tpot_mean_s=fmean([_tpot_s(o) for o in answered] or [0.0]),
        hit_rate=cached_tokens / prompt_tokens,
        oracle_rate=sum(o.oracle_tokens for o in outcomes) / prompt_tokens,
        skew=_skew([load.total_s for load in world.loads]),
        busy_skew=_skew([engine.busy_s for engine in world.engines]),
        replica_use=fmean(engine.busy_s for engine in world.engines) / world.now,
        expected_error=_expected_error(answered),
    )


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure over runs that differ by their seed."""
    values = [{name: value for name, value in asdict(run).items() if value is not None} for run in runs]
    return replace(runs[0], **{name: median(of[name] for of in values) for name in values[0]})


def is_good(outcome: Outcome, hardware: Hardware) -> bool:
    return _ttft_s(outcome) <= hardware.ttft_s and _tpot_s(outcome) <= hardware.tpot_s


def _ttft_s(outcome: Outcome) -> float:
    assert outcome.first_byte_s is not None
    return outcome.first_byte_s - outcome.arrived_s


def _tpot_s(outcome: Outcome) -> float:
    assert outcome.first_byte_s is not None
    assert outcome.ended_s is not None
    return (outcome.ended_s - outcome.first_byte_s) / max(outcome.output_tokens - 1, 1)


def _expected_error(answered: Sequence[Outcome]) -> float | None:
    pairs = [(o.expected_tokens, o.cached_tokens) for o in answered if o.expected_tokens is not None]
    return sum(abs(e - c) for e, c in pairs) / max(sum(c for _, c in pairs), 1) if pairs else None


def _percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def _skew(values: Sequence[float]) -> float:
    mean = fmean(values)
    return max(values) / mean if mean else 1.0
