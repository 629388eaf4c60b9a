"""Laws of the Recommender over random load series with noise, gaps and random behaviors."""

import math
from dataclasses import replace
from decimal import Decimal

from hypothesis import given, settings
from hypothesis import strategies as st
from octavo_operator.scaling.behavior import Behavior, ScalingPolicy, ScalingRules
from octavo_operator.scaling.proposal import Metric
from octavo_operator.scaling.recommender import Recommendation
from octavo_testing.scaled_service import SYNC_S, ScaledService

MAX_REPLICAS = 40
SERIES = settings(max_examples=max(120, settings().max_examples))  # of six laws

policies = st.builds(
    ScalingPolicy,
    type=st.sampled_from(["Pods", "Percent"]),
    value=st.integers(1, 120),
    period_s=st.sampled_from([5, 15, 40, 60, 300]),
)
rules = st.builds(
    ScalingRules,
    stabilization_s=st.sampled_from([0, 30, 60, 300]),
    select=st.sampled_from(["Max", "Min", "Disabled"]),
    policies=st.lists(policies, min_size=1, max_size=3).map(tuple),
    tolerance=st.sampled_from([0.0, 0.1, 0.3]),
)
behaviors = st.one_of(st.just(Behavior()), st.builds(Behavior, scale_up=rules, scale_down=rules))
loads = st.one_of(st.none(), st.floats(0, 60, allow_nan=False), st.sampled_from([0.0, 0.5, 1.0, 10.0, 1000.0]))
bounds = st.tuples(st.integers(1, 10), st.integers(0, 30)).map(lambda pair: (pair[0], sum(pair)))


class Service(ScaledService):
    """A service whose metrics have the target 1."""

    def __init__(self, replicas: int, behavior: Behavior, bounds: tuple[int, int] = (1, MAX_REPLICAS)) -> None:
        super().__init__(replicas, behavior, bounds)

    def sync_sums(self, *sums: float | None, status_replicas: int | None = None) -> Recommendation:
        metrics = [Metric(name=f"metric {idx}", sum=value, average=Decimal(1)) for idx, value in enumerate(sums)]
        return self.sync(*metrics, status_replicas=status_replicas)


@SERIES
@given(st.data(), behaviors, bounds, st.integers(1, 60))
def test_the_count_stays_within_its_bounds(
    data: st.DataObject, behavior: Behavior, bounds: tuple[int, int], replicas: int
) -> None:
    service = Service(replicas, behavior, bounds)
    for pair in data.draw(st.lists(st.tuples(loads, loads), min_size=5, max_size=40)):
        found = service.sync_sums(*pair, status_replicas=data.draw(st.integers(0, 60)))
        assert bounds[0] <= found.replicas <= bounds[1]


@SERIES
@given(st.data(), behaviors, st.integers(1, MAX_REPLICAS))
def test_a_missing_metric_never_lowers_the_count(data: st.DataObject, behavior: Behavior, replicas: int) -> None:
    service = Service(replicas, behavior)
    for pair in data.draw(st.lists(st.tuples(loads, loads), min_size=5, max_size=40)):
        before = service.replicas
        found = service.sync_sums(*pair, status_replicas=data.draw(st.integers(0, 60)))
        assert found.replicas >= (before if None in pair else 1)


@SERIES
@given(st.floats(0, 60, allow_nan=False), st.integers(1, MAX_REPLICAS), behaviors)
def test_a_constant_load_reaches_a_count_that_stays(load: float, replicas: int, behavior: Behavior) -> None:
    service = Service(replicas, behavior)
    counts = [service.sync_sums(load).replicas for _ in range(850)]  # at least one replica per 300 s, and the window
    assert counts in (sorted(counts), sorted(counts, reverse=True))  # no flapping on the way
    assert len(set(counts[-20:])) == 1


@SERIES
@given(st.integers(1, 30), st.lists(st.floats(-0.099, 0.099), min_size=5, max_size=60))
def test_noise_within_the_tolerance_changes_nothing(replicas: int, noise: list[float]) -> None:
    service = Service(replicas, Behavior())
    assert {service.sync_sums(replicas * (1 + part)).replicas for part in noise} == {replicas}


@SERIES
@given(st.lists(st.floats(0, 60, allow_nan=False), min_size=5, max_size=60), st.integers(1, MAX_REPLICAS), rules, rules)
def test_changes_are_bounded_by_the_policies(
    series: list[float], replicas: int, scale_up: ScalingRules, scale_down: ScalingRules
) -> None:
    """All policies get one period: an HPA forgets changes that are older than the periods of their own direction."""
    period_s = scale_up.policies[0].period_s
    behavior = Behavior(scale_up=_with_period(scale_up, period_s), scale_down=_with_period(scale_down, period_s))
    service, counts = Service(replicas, behavior), [replicas]
    for load in series:
        counts.append(service.sync_sums(load).replicas)
        start = counts[-1 - min(len(counts) - 1, max(1, math.ceil(period_s / SYNC_S)))]
        assert counts[-1] <= max(counts[-2], start + _largest_step(behavior.scale_up, start))
        assert counts[-1] >= min(counts[-2], start - _largest_step(behavior.scale_down, start))


def _with_period(rules: ScalingRules, period_s: int) -> ScalingRules:
    return replace(rules, policies=tuple(replace(policy, period_s=period_s) for policy in rules.policies))


def _largest_step(rules: ScalingRules, start: int) -> int:
    if rules.select == "Disabled":
        return 0
    steps = [policy.value if policy.type == "Pods" else start * policy.value // 100 + 1 for policy in rules.policies]
    return max(steps) if rules.select == "Max" else min(steps)


@SERIES
@given(st.data(), st.integers(1, MAX_REPLICAS))
def test_after_a_spike_the_count_holds_for_the_window(data: st.DataObject, replicas: int) -> None:
    exact = [replace(rules, tolerance=0.0) for rules in (Behavior().scale_up, Behavior().scale_down)]
    service, asked = Service(replicas, Behavior(scale_up=exact[0], scale_down=exact[1])), [replicas]
    for load in data.draw(st.lists(st.one_of(st.floats(0, 5), st.floats(0, 40)), min_size=5, max_size=60)):
        before = service.replicas
        asked.append(math.ceil(round(load * 1000) / 1000))
        highest = max(asked[-math.ceil(300 / SYNC_S) :])
        assert service.sync_sums(load).replicas >= min(before, max(1, highest))
