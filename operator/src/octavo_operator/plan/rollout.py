"""Rolls out engine Deployments, one for each revision: decides their replicas (`replica_targets`), drains the pods that
shall go (`drain`), and deletes the Deployments that are not needed any more."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.names import engine_deployment
from octavo_operator.observed import EngineDeployment, Observed, Pod
from octavo_operator.plan.actions import Action, Delete, SetReplicas
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.child_actions import child_actions
from octavo_operator.plan.drain import DrainStep, drain
from octavo_operator.plan.rollout_pace import Pace
from octavo_operator.plan.rollout_targets import Revision, Situation, replica_targets
from octavo_operator.service import DEFAULT_PLANNED_DRAIN_S, InferenceService, Settings


@dataclass(frozen=True, slots=True)
class Steps:
    """The actions for engine Deployments, and the pods that are drained meanwhile."""

    actions: tuple[Action, ...]
    drain: DrainStep


def rollout(service: InferenceService, observed: Observed, settings: Settings, pace: Pace, *, now: str) -> Steps:
    wanted = engine_revision(service, settings, live=observed.revisions)
    name = engine_deployment(service.name, wanted)
    live = [s for s in observed.engine_deployments if not s.is_deleting]
    kept = wanted if pace.reason != "DeadlineExceeded" else _fallback(observed, live, wanted)
    targets = replica_targets(_situation(service, observed, pace, kept))
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
            actions.append(Delete("Deployment", each.name, each.uid, each.version, why))
        elif each.revision != wanted and drained.replicas[each.name] != each.replicas:
            why = f"revision {kept} shall have {service.spec.replicas} replicas"
            actions.append(SetReplicas(each.name, each.uid, drained.replicas[each.name], why))
    removed = {pod.name for pod in observed.staying_pods if pod.revision not in {wanted, *observed.revisions}}
    return Steps(tuple(actions), replace(drained, leaving=drained.leaving | removed))


def scale_current(
    observed: Observed, replicas: int | None, *, now: str, timeout_s: int = DEFAULT_PLANNED_DRAIN_S
) -> Steps:
    """Scale the Deployment with the most admitted pods; of several, the one that served last, else the newest one.
    `replicas`: None keeps those of all."""
    staying = [s for s in observed.engine_deployments if not s.is_deleting]
    admitted, last = _num_admitted(observed), last_served(observed)
    current = max(staying, key=lambda s: (admitted[s.revision], s.revision == last, s.created), default=None)
    targets = {} if current is None or replicas is None else {current.name: replicas}
    drained = drain(observed, targets, timeout_s=timeout_s, now=now)
    why = f"the spec asks for {replicas} replicas"
    changed = (s for s in staying if drained.replicas[s.name] != s.replicas)
    return Steps(tuple(SetReplicas(s.name, s.uid, drained.replicas[s.name], why) for s in changed), drained)


def last_served(observed: Observed) -> str | None:
    """The revision that serves or, without one, that served last, if its Deployment exists."""
    revision = observed.status.get("revision", {}).get("current")
    return revision if revision in observed.revisions else None


def is_complete(service: InferenceService, observed: Observed, wanted: str) -> bool:
    return sum(pod.revision == wanted and pod.serves for pod in observed.pods) >= service.spec.replicas


def _fallback(observed: Observed, live: list[EngineDeployment], wanted: str) -> str:
    """The revision that stays if the wanted one has failed: the one that serves best."""
    admitted, others = _num_admitted(observed), [s for s in live if s.revision != wanted]
    return max(others, key=lambda s: (admitted[s.revision], s.created)).revision if others else wanted


def _situation(service: InferenceService, observed: Observed, pace: Pace, kept: str) -> Situation:
    """`kept`: the revision that shall have all replicas in the end."""
    admitted, last = _num_admitted(observed), last_served(observed)

    def revision(name: str, revision: str, live: EngineDeployment | None) -> Revision:
        pods = [pod for pod in observed.staying_pods if pod.revision == revision]
        return Revision(
            name=name,
            replicas=0 if live is None else live.replicas,
            pods=len(pods),
            serving=sum(pod.serves for pod in pods),
            admitted=admitted[revision],
            served_last=revision == last,
            created="" if live is None else live.created,
        )

    live = {s.revision: s for s in observed.engine_deployments if not s.is_deleting}
    older = [revision(s.name, s.revision, s) for s in live.values() if s.revision != kept]
    ending = _ending(observed, {kept, *live})
    return Situation(
        desired=service.spec.replicas,
        wanted=revision(engine_deployment(service.name, kept), kept, live.get(kept)),
        older=older,
        ending=sum(bool(older) or pod.revision != kept for pod in ending),
        surge=pace.surge,
        in_place=pace.in_place,
        paused=pace.reason == "Paused",
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
