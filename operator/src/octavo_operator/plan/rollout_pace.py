"""`pace_of`: the pace of a rollout: with a surge or in place, paused, or stopped at its deadline.

A rollout that waits for room is not at fault: only a pod that has its node runs against the deadline. Facts that must
outlast their pods are in the status: the field `rollout.inPlace`, until all replicas serve or another revision is
wanted, and the reason DeadlineExceeded of the condition Progressing, until another revision is wanted.
"""

from dataclasses import dataclass
from typing import Literal

from octavo_operator.observed import Observed, Pod
from octavo_operator.service import InferenceService
from octavo_operator.timestamps import seconds_since

Reason = Literal["RollingOut", "NoRoomToSurge", "Paused", "DeadlineExceeded", "UpgradeWaits", "UpgradeStopped"]


@dataclass(frozen=True, slots=True)
class Pace:
    """`reason`: of the condition Progressing while the rollout is not complete. `why`: for its message."""

    surge: int = 1
    in_place: bool = False
    reason: Reason = "RollingOut"
    why: str = ""

    @property
    def is_held(self) -> bool:
        return self.reason in ("UpgradeWaits", "UpgradeStopped")


STEADY = Pace()


def pace_of(service: InferenceService, observed: Observed, wanted: str, *, now: str) -> Pace:
    """`wanted`: the new revision. `now`: RFC 3339."""
    spec, pods = service.spec.rollout, [pod for pod in observed.staying_pods if pod.revision == wanted]
    surge = spec.max_surge or 1
    is_short = sum(pod.serves for pod in observed.pods) < service.spec.replicas
    was_in_place = spec.strategy != "Surge" and _was_in_place(observed, wanted, is_short=is_short)
    others = {s.revision for s in observed.engine_deployments if s.revision != wanted and not s.is_deleting}
    if not others:  # in place until the last old pod has ended and all replicas serve
        is_ending = any(pod.revision != wanted and not pod.has_ended for pod in observed.pods)
        return Pace(surge, was_in_place and (is_ending or is_short))
    if spec.paused:
        return Pace(surge, spec.strategy == "InPlace" or was_in_place, "Paused", "spec.rollout.paused is true")
    if why := _failure(observed, wanted, pods, spec.deadline_s, now=now):
        return Pace(surge, was_in_place and is_short, "DeadlineExceeded", why)
    waiting = [pod for pod in pods if _waits(pod, spec.patience_s, now=now)]
    if spec.strategy == "InPlace" or was_in_place:
        return Pace(surge, True)
    if waiting and spec.strategy != "Surge" and service.spec.replicas > 1:
        return Pace(surge, True)
    if waiting:
        why = f"{waiting[0].name} has found no room for {spec.patience_s} s: {waiting[0].message}"
        return Pace(surge, False, "NoRoomToSurge", why)
    return Pace(surge)


def _waits(pod: Pod, patience_s: int, *, now: str) -> bool:
    """Return whether a pod has found no node for so long, or none where its volume is: an old replica may hold that."""
    since = pod.stuck_since if pod.trouble == "MountFailed" else pod.waits_since
    return since is not None and seconds_since(since, now) >= patience_s


def _was_in_place(observed: Observed, wanted: str, *, is_short: bool) -> bool:
    """Return whether the rollout goes in place already, or continues another one that left a replica less."""
    status = observed.status
    is_same = status.get("revision", {}).get("updated") == wanted
    return (is_same or is_short) and bool(status.get("rollout", {}).get("inPlace"))


def _failure(observed: Observed, wanted: str, pods: list[Pod], deadline_s: int, *, now: str) -> str:
    """The reason why the rollout is stopped; empty if it is not."""
    for row in observed.status.get("conditions", ()):
        if row["reason"] == "DeadlineExceeded" and observed.status.get("revision", {}).get("updated") == wanted:
            return str(row["message"])
    for pod in pods:
        if pod.stuck_since is not None and seconds_since(pod.stuck_since, now) >= deadline_s:
            trouble = f": {pod.trouble}: {pod.message}" if pod.trouble else ""
            return f"{pod.name} of revision {wanted} did not serve within {deadline_s} s of having its node{trouble}"
    return ""
