"""The Recommender by tables: counts computed by hand from the rules of Kubernetes 1.34, pkg/controller/podautoscaler.

The functions in the headings are those of horizontal.go and replica_calculator.go. The target is 1 per replica.
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from octavo_operator.scaling.behavior import read_behavior
from octavo_operator.scaling.proposal import Metric
from octavo_operator.scaling.recommender import Recommendation
from octavo_testing.scaled_service import ScaledService

NO_WINDOW = {"stabilizationWindowSeconds": 0}
AT_ONCE = {"scaleDown": NO_WINDOW}


def _kv(value: float | None, average: str = "1") -> Metric:
    return Metric(name="kv_used_replicas", sum=value, average=Decimal(average))


def _waiting(value: float | None, average: str = "1") -> Metric:
    return Metric(name="waiting_requests", sum=value, average=Decimal(average))


class Service(ScaledService):
    def __init__(self, replicas: int, document: dict[str, Any] | None = None, bounds: tuple[int, int] = (1, 100)):
        super().__init__(replicas, read_behavior(document), bounds)

    def counts(self, loads: Sequence[float | None], every_s: float = 15) -> list[int]:
        return [self.sync(_kv(load), after_s=every_s).replicas for load in loads]


# GetObjectPerPodMetricReplicas, Tolerances.isWithin


@pytest.mark.parametrize(
    ("replicas", "status_replicas", "load", "average", "expected"),
    [
        pytest.param(2, 2, 2.5, "1", 3, id="rounded up"),
        pytest.param(2, 2, 1.5, "0.75", 2, id="at the target"),
        pytest.param(2, 2, 1.66, "0.75", 3, id="ratio 1.107 is above the tolerance"),
        pytest.param(4, 4, 4.4, "1", 4, id="ratio 1.1 is within the tolerance"),
        pytest.param(4, 4, 4.401, "1", 5, id="one thousandth above the tolerance"),
        pytest.param(4, 4, 3.6, "1", 4, id="ratio 0.9 is within the tolerance"),
        pytest.param(10, 10, 8.9, "1", 9, id="ratio 0.89 is below the tolerance"),
        pytest.param(4, 4, 4.4004, "1", 4, id="thousandths count, not what is below them"),
        pytest.param(3, 2, 2.1, "1", 2, id="within the tolerance of the status, the status is proposed"),
        pytest.param(3, 2, 2.5, "1", 3, id="above the tolerance of the status"),
        pytest.param(1, 0, 0.0, "1", 1, id="nothing runs and no load: the minimum"),
        pytest.param(2, 0, 1.05, "1", 2, id="no tolerance while nothing runs"),
        pytest.param(3, 3, 0.0, "1", 1, id="no load: the minimum"),
        pytest.param(2, 2, 4, "0.7501", 6, id="thousandths of the target are rounded up"),
    ],
)
def test_one_metric(replicas: int, status_replicas: int, load: float, average: str, expected: int) -> None:
    service = Service(replicas, AT_ONCE)
    assert service.sync(_kv(load, average), status_replicas=status_replicas).replicas == expected


def test_tolerances_of_both_directions() -> None:
    document = {"scaleUp": {"tolerance": "0.5"}, "scaleDown": {"tolerance": "0", "stabilizationWindowSeconds": 0}}
    service = Service(2, document)
    assert service.counts([3, 3.002, 3.9, 3.0]) == [2, 4, 4, 3]


# computeReplicasForMetrics


@pytest.mark.parametrize(
    ("metrics", "expected", "reason"),
    [
        pytest.param([_kv(2), _waiting(5)], 5, "DesiredWithinRange", id="the highest count wins"),
        pytest.param([_kv(1), _waiting(0)], 1, "DesiredWithinRange", id="all metrics below the target"),
        pytest.param([_kv(None), _waiting(0)], 3, "MetricsUnavailable", id="known metrics would scale down"),
        pytest.param([_kv(None), _waiting(5)], 5, "DesiredWithinRange", id="known metrics scale up"),
        pytest.param([_kv(3), _waiting(None)], 3, "DesiredWithinRange", id="known metrics hold"),
        pytest.param([_kv(None), _waiting(None)], 3, "MetricsUnavailable", id="all unknown"),
        pytest.param([], 3, "MetricsUnavailable", id="no metric"),
    ],
)
def test_several_metrics(metrics: list[Metric], expected: int, reason: str) -> None:
    found = Service(3, AT_ONCE).sync(*metrics)
    assert (found.replicas, found.reason) == (expected, reason)


def test_syncs_with_unknown_load_leave_no_trace_in_the_windows() -> None:
    """The HPA returns before it stabilizes, so a long gap empties its windows."""
    service = Service(5, {"scaleDown": {"stabilizationWindowSeconds": 60}})
    assert service.counts([5, None, None, None, None, 1]) == [5, 5, 5, 5, 5, 1]


# reconcileAutoscaler: counts that no metric decides


@pytest.mark.parametrize(
    ("replicas", "bounds", "expected", "reason"),
    [
        pytest.param(0, (1, 5), 0, "ScalingDisabled", id="no replicas"),
        pytest.param(7, (1, 5), 5, "TooManyReplicas", id="above the maximum"),
        pytest.param(1, (2, 5), 2, "TooFewReplicas", id="below the minimum"),
    ],
)
@pytest.mark.parametrize("load", [100.0, 0.0, None])
def test_counts_out_of_bounds_and_zero(
    replicas: int, bounds: tuple[int, int], expected: int, reason: str, load: float | None
) -> None:
    found = Service(replicas, bounds=bounds).sync(_kv(load))
    assert (found.replicas, found.reason) == (expected, reason)


def test_a_corrected_count_counts_as_a_change_of_its_period() -> None:
    service = Service(20, {"scaleDown": {**NO_WINDOW, "policies": [_policy("Pods", 12, 60)]}}, bounds=(1, 10))
    assert service.counts([1, 1, 1, 1, 1]) == [10, 8, 8, 8, 1]


# convertDesiredReplicasWithBehaviorRate


def _policy(type: str, value: int, period_s: int) -> dict[str, Any]:
    return {"type": type, "value": value, "periodSeconds": period_s}


@pytest.mark.parametrize(
    ("load", "replicas", "bounds", "expected", "reason"),
    [
        pytest.param(50, 1, (1, 100), 5, "ScaleUpLimit", id="4 more pods"),
        pytest.param(50, 10, (1, 100), 20, "ScaleUpLimit", id="100 percent"),
        pytest.param(50, 1, (1, 3), 3, "TooManyReplicas", id="maximum below the policies"),
        pytest.param(50, 1, (1, 5), 5, "TooManyReplicas", id="maximum at the policies"),
        pytest.param(5, 1, (1, 5), 5, "DesiredWithinRange", id="exactly the maximum"),
        pytest.param(0, 5, (2, 9), 2, "TooFewReplicas", id="minimum"),
        pytest.param(2, 5, (2, 9), 2, "DesiredWithinRange", id="exactly the minimum"),
        pytest.param(3, 5, (2, 9), 3, "DesiredWithinRange", id="between the bounds"),
    ],
)
def test_default_limits(load: float, replicas: int, bounds: tuple[int, int], expected: int, reason: str) -> None:
    found = Service(replicas, AT_ONCE, bounds).sync(_kv(load))
    assert (found.replicas, found.reason) == (expected, reason)


@pytest.mark.parametrize(
    ("select", "policies", "highest", "lowest"),
    [
        pytest.param("Max", [_policy("Pods", 2, 60), _policy("Percent", 50, 60)], 15, 5, id="largest change"),
        pytest.param("Min", [_policy("Pods", 2, 60), _policy("Percent", 50, 60)], 12, 8, id="smallest change"),
        pytest.param("Max", [_policy("Percent", 1, 60)], 11, 9, id="a part of a replica counts as a whole one"),
        pytest.param("Disabled", [_policy("Pods", 2, 60)], 10, 10, id="disabled"),
    ],
)
def test_selection_of_policies(select: str, policies: list[dict[str, Any]], highest: int, lowest: int) -> None:
    rules = {"selectPolicy": select, "policies": policies}
    assert Service(10, {"scaleUp": rules}).sync(_kv(90)) == Recommendation(
        replicas=highest,
        reason="ScaleUpLimit",
        message=f"kv_used_replicas asks for 90 replicas; the policies of scaleUp now allow at most {highest}.",
    )
    assert Service(10, {"scaleDown": {**NO_WINDOW, **rules}}).sync(_kv(0)) == Recommendation(
        replicas=lowest,
        reason="ScaleDownLimit",
        message=f"kv_used_replicas asks for 0 replicas; the policies of scaleDown now allow at least {lowest}.",
    )


# getReplicasChangePerPeriod, storeScaleEvent


def test_changes_within_a_period_share_its_limit() -> None:
    service = Service(1, {"scaleUp": {"policies": [_policy("Pods", 3, 60)]}})
    assert service.counts([3, 10, 10, 10, 10, 10]) == [3, 4, 4, 4, 6, 7]


def test_a_change_as_old_as_the_period_counts_no_more() -> None:
    service = Service(2, {"scaleUp": {"policies": [_policy("Percent", 100, 15)]}})
    assert service.counts([50, 50, 50]) == [4, 8, 16]
    service = Service(2, {"scaleUp": {"policies": [_policy("Percent", 100, 15)]}})
    assert service.counts([50, 50, 50, 50], every_s=5) == [4, 4, 4, 8]


def test_policies_that_become_stricter_do_not_reverse_a_change() -> None:
    service = Service(2, {"scaleUp": {"policies": [_policy("Pods", 10, 60)]}})
    assert service.counts([12]) == [12]
    service.behavior = read_behavior({"scaleUp": {"policies": [_policy("Pods", 1, 60)]}})
    assert service.counts([20]) == [12]


def test_the_minimum_is_the_reason_where_policies_allow_as_much() -> None:
    service = Service(5, {"scaleDown": {**NO_WINDOW, "policies": [_policy("Pods", 3, 60)]}}, bounds=(2, 9))
    found = service.sync(_kv(0))
    assert (found.replicas, found.reason) == (2, "TooFewReplicas")


def test_removed_replicas_may_be_added_again_within_the_period() -> None:
    document = {"scaleUp": {"policies": [_policy("Pods", 1, 60)]}, **AT_ONCE}
    assert Service(5, document).counts([1, 50]) == [1, 6]


def test_a_change_older_than_its_own_periods_is_overwritten() -> None:
    """The longer period of the other direction then does not count it, as in `storeScaleEvent`."""
    document = {
        "scaleUp": {"policies": [_policy("Pods", 4, 15)]},
        "scaleDown": {**NO_WINDOW, "policies": [_policy("Pods", 1, 600)]},
    }
    service = Service(2, document)
    assert service.counts([6, 10, 1], every_s=20) == [6, 10, 5]  # both remembered: 10 - 8 - 1 = 1
    service = Service(2, document)
    assert service.counts([3, 6], every_s=5) == [3, 6]
    assert service.counts([8], every_s=30) == [8]  # in the place of the second change, of +3
    assert service.counts([1], every_s=5) == [4]  # 8 - 1 - 2, less the 1 that the policy allows


# stabilizeRecommendationWithBehaviors


def test_the_count_shrinks_when_its_window_has_passed() -> None:
    service = Service(1)
    loads: list[float | None] = [5, *[1] * 21]
    assert service.counts(loads) == [5] * 20 + [1, 1]


def test_the_highest_proposal_of_the_window_counts() -> None:
    service = Service(6, {"scaleDown": {"stabilizationWindowSeconds": 60}})
    assert service.counts([6, 4, 3, 2, 2, 2, 2, 2]) == [6, 6, 6, 6, 4, 3, 2, 2]


def test_the_lowest_proposal_of_the_window_for_growth_counts() -> None:
    service = Service(1, {"scaleUp": {"stabilizationWindowSeconds": 40}})
    assert service.counts([1, 5, 3, 4, 5, 5]) == [1, 1, 1, 3, 3, 4]


def test_a_new_recommender_does_not_shrink_a_service_at_once() -> None:
    service = Service(9)
    found = service.sync(_kv(2))
    assert found == Recommendation(
        replicas=9,
        reason="ScaleDownStabilized",
        message="kv_used_replicas asks for 2 replicas; the highest count of the last 300 s is 9.",
    )


def test_a_low_proposal_delays_growth() -> None:
    service = Service(1, {"scaleUp": {"stabilizationWindowSeconds": 60}})
    found = service.sync(_kv(8))
    assert (found.replicas, found.reason) == (1, "ScaleUpStabilized")


def test_a_peak_that_was_limited_is_not_reached_afterwards() -> None:
    """The current count lies between the bounds of both windows. An HPA without a behavior would grow to 30."""
    service = Service(1)
    assert service.counts([30, 2, 2]) == [5, 5, 5]
