"""The actions for a service whose spec is not accepted: running pods are scaled and admitted, and nothing else changes.

The spec may have been edited, or the cluster may have changed around it: another operator's version, a router or an
API that is gone. Neither may turn the next lost node into an outage.
"""

from collections.abc import Iterator

from octavo_operator.desired.engine import engine_revision
from octavo_operator.desired.router import desired_engine_budget
from octavo_operator.observed import Observed
from octavo_operator.plan.actions import Action
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.child_actions import child_actions
from octavo_operator.plan.readiness_gates import gate_actions
from octavo_operator.plan.rollout import rollout, scale_current
from octavo_operator.service import InferenceService, Settings


def keep_running(service: InferenceService, observed: Observed, settings: Settings) -> Iterator[Action]:
    """Yield the actions for a spec that can be read. The rollout of a revision that exists already continues: its
    template was accepted before."""
    if engine_revision(service, settings, live=observed.revisions) in observed.revisions:
        yield from rollout(service, observed, settings)
    else:
        yield from scale_current(observed, service.spec.replicas)
    budget = with_digest(desired_engine_budget(service))  # it counts the wanted replicas
    if (live := observed.children.get((budget["kind"], budget["metadata"]["name"]))) is not None:
        yield from child_actions(service, observed, budget, live)
    yield from gate_actions(observed)
