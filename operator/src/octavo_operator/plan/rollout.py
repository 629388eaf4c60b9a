"""Engine Deployments of a service: the wanted revision comes up, the others go when it serves.

What must hold: as long as the wanted revision doesn't serve with all of its replicas, pods that do serve are kept; and
there are never more than two revisions, the wanted one and the one that most pods serve of, however often the spec
changes.
"""

from collections import Counter
from collections.abc import Sequence

from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.observed import EngineSet, Observed, Pod
from octavo_operator.plan.actions import Action, Delete
from octavo_operator.plan.repair import applied
from octavo_operator.plan.same import stamped
from octavo_operator.service import Service, Settings


def rollout(service: Service, observed: Observed, settings: Settings) -> list[Action]:
    wanted, replicas = engine_revision(service, settings), service.spec.replicas
    manifest = stamped(desired_engine(service, settings, replicas=replicas))
    actions: list[Action] = []
    live = observed.engine_manifests.get(manifest["metadata"]["name"])
    actions.extend(applied(service, observed, manifest, live, why=f"revision {wanted} with {replicas} replicas"))
    older = [s for s in observed.engine_sets if s.revision != wanted and not s.is_deleting]
    if is_complete(service, observed, wanted):
        return actions + [_delete(s, f"revision {wanted} serves") for s in older]
    kept = _most_that_serve(older, observed.pods)
    return actions + [
        _delete(s, "another revision is wanted, and it is not the one that serves") for s in older if s is not kept
    ]


def is_complete(service: Service, observed: Observed, wanted: str) -> bool:
    serving = sum(1 for pod in observed.pods if pod.revision == wanted and pod.serves)
    return serving >= service.spec.replicas


def _most_that_serve(sets: Sequence[EngineSet], pods: Sequence[Pod]) -> EngineSet | None:
    """A pod that was admitted once counts, though it may be out of order just now: it can come back."""
    admitted = Counter(pod.revision for pod in pods if pod.is_admitted and not pod.is_terminating)
    served = [s for s in sets if admitted[s.revision]]
    return max(served, key=lambda s: (admitted[s.revision], s.created), default=None)


def _delete(engine_set: EngineSet, reason: str) -> Delete:
    return Delete("Deployment", engine_set.name, engine_set.uid, engine_set.version, reason)
