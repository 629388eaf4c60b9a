"""`Scaler`: decides the number of replicas of one service. Pure: times and loads are given, the caller writes.

Two decisions are the operator's with every provider but External: zero replicas after an idle time, and the wake from
zero when a router holds a request. Between them, an HPA decides or, with the provider Operator, the same algorithm.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_operator.names import METRIC_NAMES
from octavo_operator.observed import ScalingReason, ScalingState
from octavo_operator.scaling.behavior import Behavior, read_behavior
from octavo_operator.scaling.proposal import Metric
from octavo_operator.scaling.recommender import Recommender
from octavo_operator.scaling.service_load import ServiceLoad
from octavo_operator.spec.autoscaling import Autoscaling, MetricSpec, Provider

SYNC_S = 15.0  # the period of an HPA
#: For so long after another client has changed the replicas, the operator leaves them as they are.
TRUCE_S = 300.0
LAST_ACTIVE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The known state of the service. `total`: existing pods. `serving`: pods that serve. `load`: None if unknown.
    `held`: requests that routers hold for a first replica, as far as they have reported. `now_s`: monotonic time.
    `now`: RFC 3339."""

    replicas: int
    total: int
    serving: int
    load: ServiceLoad | None
    held: int
    now_s: float
    now: str


class IdleTime:
    """The time for which a service has had no request, by counters that only grow.

    Samples of running requests would miss short ones. So each router counts the requests of a service since its
    start, and a gap in the reports does not matter if the same starts of the routers report the same counts after it.

    Belongs to one service. Times are monotonic seconds.
    """

    def __init__(self, now_s: float) -> None:
        self.quiet_since_s = now_s
        self._requests: Mapping[str, tuple[str, int]] | None = None
        self._is_known = False

    def observe(self, load: ServiceLoad | None, now_s: float) -> None:
        """`load`: None if it is unknown."""
        self._is_known = load is not None
        if load is None:
            return
        if load.unfinished or load.requests != self._requests:
            self.quiet_since_s = now_s
        self._requests = load.requests

    def seconds(self, now_s: float) -> float | None:
        """Seconds without a request until now; None if the present load is unknown."""
        return now_s - self.quiet_since_s if self._is_known else None


class Scaler:
    """`wake_s`: length of the last wake in seconds. `last_active`: RFC 3339. Both as far as they are known."""

    def __init__(self, now_s: float, *, wake_s: int | None = None, last_active: str | None = None) -> None:
        self._idle = IdleTime(now_s)
        self._recommender = Recommender()
        self._next_sync_s = now_s
        self._own: tuple[int, ...] = ()  # replicas of the last step, and those that the operator wrote after it
        self._truce_until_s = now_s
        self._waking_since_s: float | None = None
        self._wake_s = wake_s
        self._last_active, self._last_active_s = last_active, float("-inf")
        self._state: ScalingState | None = None

    def step(self, spec: Autoscaling, provider: Provider, seen: Seen) -> ScalingState:
        """The decision: `desired` of the result is to be written if it differs from the replicas of the spec."""
        self._idle.observe(seen.load, seen.now_s)
        self._watch_wake(seen)
        self._notice_activity(seen)
        self._notice_others(provider, seen)
        if provider == "External":
            state = self._hold(seen, "External", "another autoscaler sets the replicas")
        elif seen.replicas == 0:
            state = self._at_zero(spec, seen)
        elif (idle_s := self._sleeps_after(spec, seen)) is not None:
            state = self._state_of(0, "ScaledToZero", f"no request for {idle_s:.0f} s: the next one starts a replica")
        elif provider == "HPA":
            state = self._hold(seen, "Active", "a HorizontalPodAutoscaler decides")
        else:
            state = self._recommend(spec, seen)
        self._own, self._state = (seen.replicas,), state
        return state

    def wrote(self, spec: Autoscaling, replicas: int, now_s: float) -> None:
        """Record that the operator has written the number of replicas that the last step wanted."""
        before, self._own = self._own[0], (*self._own, replicas)
        if before and replicas:  # limits of changes concern the recommender's own ones
            self._recommender.record_scaling(now_s=now_s, before=before, after=replicas, behavior=_behavior(spec))

    def _watch_wake(self, seen: Seen) -> None:
        if self._waking_since_s is not None and seen.serving:
            self._wake_s = round(seen.now_s - self._waking_since_s)
        if seen.serving or (seen.replicas == 0 and not seen.held):
            self._waking_since_s = None
        if seen.replicas and not seen.serving:
            self._idle.quiet_since_s = seen.now_s  # a model that loads for longer than the idle time must not end

    def _notice_activity(self, seen: Seen) -> None:
        is_quiet = self._idle.seconds(seen.now_s) != 0.0
        if not is_quiet and seen.now_s - self._last_active_s >= LAST_ACTIVE_EVERY_S:
            self._last_active, self._last_active_s = seen.now, seen.now_s

    def _notice_others(self, provider: Provider, seen: Seen) -> None:
        if provider == "Operator" and self._own and seen.replicas not in self._own:
            self._truce_until_s = seen.now_s + TRUCE_S

    def _at_zero(self, spec: Autoscaling, seen: Seen) -> ScalingState:
        if spec.scale_to_zero is None:
            return self._hold(seen, "Disabled", "replicas is 0, which switches autoscaling off: raise it")
        if seen.held:
            self._waking_since_s = self._waking_since_s or seen.now_s
            return self._state_of(spec.smallest, "Active", f"{seen.held} requests wait for a first replica")
        return self._hold(seen, "ScaledToZero", "the next request starts a replica")

    def _sleeps_after(self, spec: Autoscaling, seen: Seen) -> float | None:
        """Idle seconds if they suffice for zero replicas."""
        idle_s = self._idle.seconds(seen.now_s)
        if spec.scale_to_zero is None or idle_s is None or not seen.serving:
            return None
        return idle_s if idle_s >= spec.scale_to_zero.idle_seconds else None

    def _recommend(self, spec: Autoscaling, seen: Seen) -> ScalingState:
        if seen.now_s < self._truce_until_s:
            message = f"another client changed the replicas: the operator leaves them as they are for {TRUCE_S:.0f} s"
            return self._hold(seen, "ScaledByOthers", message)
        if seen.now_s < self._next_sync_s and self._state is not None and self._state.desired == seen.replicas:
            return self._state
        self._next_sync_s = seen.now_s + SYNC_S
        made = self._recommender.recommend(
            now_s=seen.now_s,
            replicas=seen.replicas,
            status_replicas=seen.total,
            min_replicas=spec.smallest,
            max_replicas=spec.max_replicas,
            metrics=[_metric(metric, seen.load) for metric in spec.wanted_metrics],
            behavior=_behavior(spec),
        )
        reason: ScalingReason = "MetricsUnavailable" if made.reason == "MetricsUnavailable" else "Active"
        return self._state_of(made.replicas, "AtMax" if made.reason == "TooManyReplicas" else reason, made.message)

    def _hold(self, seen: Seen, reason: ScalingReason, message: str) -> ScalingState:
        return self._state_of(seen.replicas, reason, message)

    def _state_of(self, desired: int, reason: ScalingReason, message: str) -> ScalingState:
        return ScalingState(desired, reason, message, last_active=self._last_active, wake_s=self._wake_s)


def _metric(metric: MetricSpec, load: ServiceLoad | None) -> Metric:
    name = METRIC_NAMES[metric.type]
    return Metric(name=name, sum=None if load is None else float(getattr(load, name)), average=metric.target)


def _behavior(spec: Autoscaling) -> Behavior:
    return read_behavior(spec.behavior_manifest)
