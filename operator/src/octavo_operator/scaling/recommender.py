"""The number of replicas of a service by its load: the algorithm of a HorizontalPodAutoscaler, without a cluster.

The source is pkg/controller/podautoscaler/horizontal.go of Kubernetes 1.34, for metrics of type Object with a target of
type AverageValue and an HPA that has a `behavior`. Each sync:

1. The load proposes a count (`proposal`). A load that is not known well enough changes no count, and is not remembered.
2. The window of each direction stabilizes the proposal: the count grows at most to the lowest proposal of the scale-up
   window, and shrinks at most to the highest of the scale-down window.
3. The policies limit the change since the start of their periods; minimum and maximum bound the count.

Also the history is kept as the HPA keeps it, with its peculiarity: a change that is older than all periods of its own
direction is overwritten by the next change, even if a longer period of the other direction would count it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo_operator.scaling.behavior import Behavior, ScalingRules
from octavo_operator.scaling.proposal import Metric, propose

#: Reasons of an HPA's conditions, and MetricsUnavailable instead of its FailedGetObjectMetric.
Reason = Literal[
    "DesiredWithinRange",
    "TooManyReplicas",
    "TooFewReplicas",
    "ScaleUpLimit",
    "ScaleDownLimit",
    "ScaleUpStabilized",
    "ScaleDownStabilized",
    "MetricsUnavailable",
    "ScalingDisabled",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    replicas: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class _Sample:
    """A proposed count, or the number of replicas by which a count was changed, and its time."""

    time_s: float
    replicas: int


class Recommender:
    """The history of one service: proposals of the last windows, and changes of the last periods.

    The caller gives the times, in seconds of a clock that only grows. A new Recommender takes the current count as the
    first proposal, as a restarted HPA controller does, so it does not shrink the service before the window has passed.
    """

    def __init__(self) -> None:
        self._proposals: list[_Sample] = []
        self._added: list[_Sample] = []
        self._removed: list[_Sample] = []

    def recommend(
        self,
        *,
        now_s: float,
        replicas: int,
        status_replicas: int,
        min_replicas: int,
        max_replicas: int,
        metrics: Sequence[Metric],
        behavior: Behavior,
    ) -> Recommendation:
        """Recommend a count. Call it once per sync, and `record_scaling` after a different count was written.

        `replicas`, `status_replicas`: `spec.replicas` and `status.replicas` of `/scale`. `min_replicas`: at least 1;
        scaling to and from 0 is decided elsewhere.
        """
        if not self._proposals:
            self._proposals.append(_Sample(now_s, replicas))
        if replicas == 0:
            message = "Autoscaling is off while the service has 0 replicas."
            return Recommendation(replicas=0, reason="ScalingDisabled", message=message)
        if replicas > max_replicas:
            message = f"The service had {replicas} replicas; maxReplicas is {max_replicas}."
            return Recommendation(replicas=max_replicas, reason="TooManyReplicas", message=message)
        if replicas < min_replicas:
            message = f"The service had {replicas} replicas; minReplicas is {min_replicas}."
            return Recommendation(replicas=min_replicas, reason="TooFewReplicas", message=message)
        proposal = propose(metrics, replicas, status_replicas, behavior)
        if proposal.replicas is None:
            return Recommendation(replicas=replicas, reason="MetricsUnavailable", message=proposal.message)
        stable = self._stabilize(now_s, replicas, proposal.replicas, behavior)
        allowed, reason = self._limit(now_s, replicas, stable, (min_replicas, max_replicas), behavior)
        message = proposal.message
        if stable != proposal.replicas:
            is_up = proposal.replicas >= replicas
            window_s = (behavior.scale_up if is_up else behavior.scale_down).stabilization_s
            message += f"; the {'lowest' if is_up else 'highest'} count of the last {window_s} s is {stable}"
            if allowed == stable:
                reason = "ScaleUpStabilized" if is_up else "ScaleDownStabilized"
        if allowed != stable:
            message += f"; {_LIMITS[reason]} {allowed}"
        return Recommendation(replicas=allowed, reason=reason, message=f"{message}.")

    def record_scaling(self, *, now_s: float, before: int, after: int, behavior: Behavior) -> None:
        """Remember that `spec.replicas` was changed by a recommendation; other changes are not to be recorded."""
        if after > before:
            _remember(self._added, _Sample(now_s, after - before), behavior.scale_up.longest_period_s)
        elif after < before:
            _remember(self._removed, _Sample(now_s, before - after), behavior.scale_down.longest_period_s)

    def _stabilize(self, now_s: float, replicas: int, proposed: int, behavior: Behavior) -> int:
        """Return the count between the windows' bounds that is nearest to the current one; remember the proposal."""
        up_s, down_s = behavior.scale_up.stabilization_s, behavior.scale_down.stabilization_s
        lowest = min([proposed, *(p.replicas for p in self._proposals if p.time_s > now_s - up_s)])
        highest = max([proposed, *(p.replicas for p in self._proposals if p.time_s > now_s - down_s)])
        _remember(self._proposals, _Sample(now_s, proposed), max(up_s, down_s))
        return min(max(replicas, lowest), highest)

    def _limit(
        self, now_s: float, replicas: int, stable: int, bounds: tuple[int, int], behavior: Behavior
    ) -> tuple[int, Reason]:
        """Return the count that policies and `bounds` (minimum, maximum) allow, and the reason."""
        minimum, maximum = bounds
        if stable > replicas:
            policies = max(replicas, self._policy_limit(now_s, replicas, behavior.scale_up, 1))
            if stable > (allowed := min(policies, maximum)):
                return allowed, "ScaleUpLimit" if policies < maximum else "TooManyReplicas"
        elif stable < replicas:
            policies = min(replicas, self._policy_limit(now_s, replicas, behavior.scale_down, -1))
            if stable < (allowed := max(policies, minimum)):
                return allowed, "ScaleDownLimit" if policies > minimum else "TooFewReplicas"
        return stable, "DesiredWithinRange"

    def _policy_limit(self, now_s: float, replicas: int, rules: ScalingRules, sign: Literal[1, -1]) -> int:
        """Return the highest count that policies for growth (`sign` 1) allow now, or the lowest for shrinking (-1)."""
        if rules.select == "Disabled":
            return replicas
        limits = []
        for policy in rules.policies:
            start = self._count_at(now_s - policy.period_s, replicas)
            share = start * (1 + sign * policy.value / 100)
            percent = math.ceil(share) if sign > 0 else int(share)
            limits.append(start + sign * policy.value if policy.type == "Pods" else percent)
        return max(limits) if (rules.select == "Max") == (sign > 0) else min(limits)

    def _count_at(self, time_s: float, replicas: int) -> int:
        """Count at a time in the past, by the changes since then."""
        return replicas - _total(self._added, time_s) + _total(self._removed, time_s)


def _total(changes: Iterable[_Sample], since_s: float) -> int:
    return sum(change.replicas for change in changes if change.time_s > since_s)


def _remember(samples: list[_Sample], sample: _Sample, window_s: float) -> None:
    """Add a sample in the place of the last one that is older than the window, if there is one."""
    for idx in reversed(range(len(samples))):
        if samples[idx].time_s < sample.time_s - window_s:
            samples[idx] = sample
            return
    samples.append(sample)


_LIMITS: dict[Reason, str] = {
    "TooManyReplicas": "maxReplicas is",
    "TooFewReplicas": "minReplicas is",
    "ScaleUpLimit": "the policies of scaleUp now allow at most",
    "ScaleDownLimit": "the policies of scaleDown now allow at least",
}
