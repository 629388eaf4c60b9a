"""Rolls out engines, with a Deployment or a LeaderWorkerSet for each revision: `pace_of` decides whether a rollout
surges, runs in place, is paused or stopped at its deadline; `rollout` sets numbers of replicas (`replica_targets`),
drains pods before their removal (`drain`), and deletes objects that are no longer needed.

Time in which a pod waits for a node does not count towards the deadline. Two facts must outlive the pods, so the status
has them until the spec asks for another revision: the field `rollout.inPlace` (only until all replicas serve), and the
reason DeadlineExceeded of the condition Progressing.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from octavo_operator.desired.engine import desired_engine, engine_ref, engine_revision
from octavo_operator.names import GROUP_SET
from octavo_operator.observed import EngineDeployment, Observed, Pod
from octavo_operator.plan.actions import Action, Delete, SetReplicas
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.child_actions import child_actions
from octavo_operator.plan.drain import DrainStep, drain
from octavo_operator.plan.rollout_targets import Revision, Situation, replica_targets
from octavo_operator.service import DEFAULT_PLANNED_DRAIN_S, InferenceService, Settings
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


@dataclass(frozen=True, slots=True)
class Steps:
    """The actions for engine Deployments, and the pods that are drained meanwhile."""

    actions: tuple[Action, ...]
    drain: DrainStep


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
    whole = [pod for pod in pods if len(pod.parts) >= service.num_nodes]
    if why := _failure(observed, wanted, whole, spec.deadline_s, now=now):
        return Pace(surge, was_in_place and is_short, "DeadlineExceeded", why)
    waiting = [part for pod in pods for part in pod.parts if _waits(part, spec.patience_s, now=now)]
    if spec.strategy == "InPlace" or was_in_place:
        return Pace(surge, True)
    if waiting and spec.strategy != "Surge" and service.spec.replicas > 1:
        return Pace(surge, True)
    if waiting:
        why = f"{waiting[0].name} has found no room for {spec.patience_s} s: {waiting[0].message}"
        return Pace(surge, False, "NoRoomToSurge", why)
    return Pace(surge)


def _waits(pod: Pod, patience_s: int, *, now: str) -> bool:
    """Return whether, for `patience_s`, a pod had no node or could not mount its volume, which an old replica may
    hold."""
    since = pod.stuck_since if pod.trouble == "MountFailed" else pod.waits_since
    return since is not None and seconds_since(since, now) >= patience_s


def _was_in_place(observed: Observed, wanted: str, *, is_short: bool) -> bool:
    """Return whether this rollout already runs in place, or follows one in place that has left a replica too few."""
    status = observed.status
    is_same = status.get("revision", {}).get("updated") == wanted
    return (is_same or is_short) and bool(status.get("rollout", {}).get("inPlace"))


def _failure(observed: Observed, wanted: str, pods: list[Pod], deadline_s: int, *, now: str) -> str:
    """The reason why the rollout is stopped; empty if it is not."""
    for row in observed.status.get("conditions", ()):
        if row["reason"] == "DeadlineExceeded" and observed.status.get("revision", {}).get("updated") == wanted:
            return str(row["message"])
    for pod in pods:
        since = _stuck_since(pod)
        if since is not None and seconds_since(since, now) >= deadline_s:
            cause = next(iter(pod.causes), pod)
            trouble = f": {cause.trouble}: {cause.message}" if cause.trouble else ""
            return f"{cause.name} of revision {wanted} did not serve within {deadline_s} s of having its node{trouble}"
    return ""


def _stuck_since(pod: Pod) -> str | None:
    """Return the time since when a replica has been unready although all of its pods have nodes."""
    if pod.stuck_since is None or not all(part.has_node for part in pod.parts):
        return None
    return max(part.stuck_since or "" for part in pod.parts)


def rollout(service: InferenceService, observed: Observed, settings: Settings, pace: Pace, *, now: str) -> Steps:
    wanted = engine_revision(service, settings, live=observed.revisions)
    _, name = engine_ref(service, wanted)
    live = [s for s in observed.engine_deployments if not s.is_deleting]
    kept = wanted if pace.reason != "DeadlineExceeded" else _fallback(observed, live, wanted)
    main = name if kept == wanted else next(s.name for s in live if s.revision == kept)
    targets = replica_targets(_situation(service, observed, pace, kept, main))
    drained = drain(observed, targets, timeout_s=service.planned_drain_s, now=now)
    actions: list[Action] = []
    if kept == wanted:
        replicas = drained.replicas.get(name, targets[name])
        manifest = with_digest(desired_engine(service, settings, replicas=replicas, live=observed.revisions))
        why = f"revision {wanted} with {replicas} replicas"
        actions += child_actions(service, observed, manifest, observed.engine_manifests.get(name), why=why)
    for each in live:
        if each.revision != kept and targets[each.name] == drained.replicas[each.name] == 0:
            why = f"revision {kept} serves" if is_complete(service, observed, kept) else "other revisions serve"
            actions.append(Delete(each.kind, each.name, each.uid, each.version, why))
        elif each.revision != wanted and drained.replicas[each.name] != each.replicas:
            why = f"revision {kept} shall have {service.spec.replicas} replicas"
            actions.append(SetReplicas(each.kind, each.name, each.uid, drained.replicas[each.name], why))
    removed = {pod.name for pod in observed.staying_pods if pod.revision not in {wanted, *observed.revisions}}
    return Steps(tuple(actions), replace(drained, leaving=drained.leaving | removed))


def scale_current(
    observed: Observed, replicas: int | None, *, now: str, timeout_s: int = DEFAULT_PLANNED_DRAIN_S
) -> Steps:
    """Scale the revision with the most admitted pods; among equals, the one that served last, else the newest one. If
    `replicas` is None, no revision is scaled."""
    staying = [s for s in observed.engine_deployments if not s.is_deleting]
    admitted, last = _num_admitted(observed), last_served(observed)
    current = max(staying, key=lambda s: (admitted[s.revision], s.revision == last, s.created), default=None)
    targets: dict[str, int] = {}
    if current is not None and replicas is not None:
        targets[current.name] = _revision(observed, current.name, current.revision, current).replicas_for(replicas)
    drained = drain(observed, targets, timeout_s=timeout_s, now=now)
    why = f"the spec asks for {replicas} replicas"
    changed = (s for s in staying if drained.replicas[s.name] != s.replicas)
    return Steps(tuple(SetReplicas(s.kind, s.name, s.uid, drained.replicas[s.name], why) for s in changed), drained)


def last_served(observed: Observed) -> str | None:
    """The revision that serves or, without one, that served last, if its object exists."""
    revision = observed.status.get("revision", {}).get("current")
    return revision if revision in observed.revisions else None


def is_complete(service: InferenceService, observed: Observed, wanted: str) -> bool:
    return sum(pod.revision == wanted and pod.serves for pod in observed.pods) >= service.spec.replicas


def _fallback(observed: Observed, live: list[EngineDeployment], wanted: str) -> str:
    """The revision that stays if the wanted one has failed: the one that serves best."""
    admitted, others = _num_admitted(observed), [s for s in live if s.revision != wanted]
    return max(others, key=lambda s: (admitted[s.revision], s.created)).revision if others else wanted


def _situation(service: InferenceService, observed: Observed, pace: Pace, kept: str, name: str) -> Situation:
    """`kept`, `name`: the revision that shall have all replicas in the end, and its object."""
    live = {s.revision: s for s in observed.engine_deployments if not s.is_deleting}
    older = [_revision(observed, s.name, s.revision, s) for s in live.values() if s.revision != kept]
    ending = _ending(observed, {kept, *live})
    return Situation(
        desired=service.spec.replicas,
        wanted=_revision(observed, name, kept, live.get(kept)),
        older=older,
        ending=sum(bool(older) or pod.revision != kept for pod in ending),
        surge=pace.surge,
        in_place=pace.in_place,
        paused=pace.reason == "Paused",
    )


def _revision(observed: Observed, name: str, revision: str, live: EngineDeployment | None) -> Revision:
    pods = [pod for pod in observed.staying_pods if pod.revision == revision]
    serving = [pod.ordinal for pod in pods if pod.serves]
    return Revision(
        name=name,
        replicas=0 if live is None else live.replicas,
        pods=len(pods),
        serving=serving if live is not None and live.kind == GROUP_SET else range(len(serving)),
        admitted=_num_admitted(observed)[revision],
        served_last=revision == last_served(observed),
        created="" if live is None else live.created,
    )


def _num_admitted(observed: Observed) -> Counter[str]:
    """Pods by revision that were admitted once: those that drain can be admitted again."""
    return Counter(pod.revision for pod in observed.staying_pods if pod.is_admitted or pod.draining_since)


def _ending(observed: Observed, revisions: set[str]) -> Iterator[Pod]:
    """Pods that hold a node until they have ended. A lost node is not free again for anybody."""
    for pod in observed.pods:
        is_going = pod.is_terminating or pod.revision not in revisions
        if is_going and pod.has_node and not pod.has_ended and pod.trouble != "NodeLost":
            yield pod
