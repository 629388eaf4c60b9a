"""Rolls out engine Deployments: starts the wanted revision and deletes the older ones when it serves.

Invariant: no action reduces the number of serving pods below the wanted number. So while the wanted revision lacks
replicas, as many older revisions stay as are needed to replace them: mostly one, chosen by its number of admitted pods.
The revision that served last stays without admitted pods, too: a lost node must not end it while the wanted one can't
start. Any other revision without admitted pods is deleted at once, however often the spec changes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.observed import EngineDeployment, Observed, Pod
from octavo_operator.plan.actions import Action, Delete, SetReplicas
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.child_actions import child_actions
from octavo_operator.service import InferenceService, Settings


def rollout(service: InferenceService, observed: Observed, settings: Settings) -> list[Action]:
    live_revisions, replicas = observed.revisions, service.spec.replicas
    wanted = engine_revision(service, settings, live=live_revisions)
    manifest = with_digest(desired_engine(service, settings, replicas=replicas, live=live_revisions))
    actions: list[Action] = []
    live = observed.engine_manifests.get(manifest["metadata"]["name"])
    actions.extend(child_actions(service, observed, manifest, live, why=f"revision {wanted} with {replicas} replicas"))
    older = [s for s in observed.engine_deployments if s.revision != wanted and not s.is_deleting]
    if is_complete(service, observed, wanted):
        return actions + [_delete(s, f"revision {wanted} serves") for s in older]
    missing = replicas - _num_serving(wanted, observed.pods)
    needed = _still_needed(older, observed.pods, missing=missing, last=last_served(observed))
    if live is None and _is_refused(observed):  # the wanted revision can't start: an older one serves until it can
        actions.extend(action for action in scale_current(observed, replicas) if action.name in needed)
    return actions + [
        _delete(s, "another revision is wanted, and other revisions serve") for s in older if s.name not in needed
    ]


def last_served(observed: Observed) -> str | None:
    """The revision that serves or, without one, that served last, if its Deployment exists."""
    revision = observed.status.get("revision", {}).get("current")
    return revision if any(s.revision == revision and not s.is_deleting for s in observed.engine_deployments) else None


def scale_current(observed: Observed, replicas: int) -> Iterator[SetReplicas]:
    """Scale the Deployment with the most admitted pods; of several, the one that served last, else the newest one."""
    admitted = Counter(pod.revision for pod in observed.pods if pod.is_admitted and not pod.is_terminating)
    found = [s for s in observed.engine_deployments if not s.is_deleting]
    last = last_served(observed)
    current = max(found, key=lambda s: (admitted[s.revision], s.revision == last, s.created), default=None)
    if current is not None and current.replicas != replicas:
        yield SetReplicas(current.name, current.uid, replicas, f"the spec asks for {replicas} replicas")


def _is_refused(observed: Observed) -> bool:
    rows = observed.status.get("conditions", ())
    return any((row["type"], row["reason"]) == ("ChildrenApplied", "Refused") for row in rows)


def is_complete(service: InferenceService, observed: Observed, wanted: str) -> bool:
    return _num_serving(wanted, observed.pods) >= service.spec.replicas


def _num_serving(revision: str, pods: Sequence[Pod]) -> int:
    return sum(pod.revision == revision and pod.serves for pod in pods)


def _still_needed(sets: Sequence[EngineDeployment], pods: Sequence[Pod], *, missing: int, last: str | None) -> set[str]:
    """Names of the Deployments to keep: those with the most admitted pods, which count even if they are unready now, as
    they can recover. Without one, that of the revision `last`. `missing`: number of serving pods that they must
    provide."""
    admitted = Counter(pod.revision for pod in pods if pod.is_admitted and not pod.is_terminating)
    if missing > 0 and not any(admitted[s.revision] for s in sets):
        return {s.name for s in sets if s.revision == last}
    needed = set()
    for deployment in sorted(sets, key=lambda s: (admitted[s.revision], s.created), reverse=True):
        if missing > 0 and admitted[deployment.revision]:
            needed.add(deployment.name)
            missing -= _num_serving(deployment.revision, pods)
    return needed


def _delete(deployment: EngineDeployment, reason: str) -> Delete:
    return Delete("Deployment", deployment.name, deployment.uid, deployment.version, reason)
