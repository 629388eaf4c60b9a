"""The actions for a service whose spec is not accepted: running pods are scaled and admitted, and nothing else changes.

The spec may have been edited, or the cluster may have changed around it: another operator's version, a router or an
API that is gone. Neither may turn the next lost node into an outage.
"""

from octavo_operator.desired.engine import engine_revision
from octavo_operator.desired.router import desired_engine_budget
from octavo_operator.observed import Observed
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.child_actions import child_actions
from octavo_operator.plan.pace import Pace
from octavo_operator.plan.rollout import Steps, rollout, scale_current
from octavo_operator.service import InferenceService, Settings


def keep_running(service: InferenceService, observed: Observed, settings: Settings, pace: Pace, *, now: str) -> Steps:
    """The actions for a spec that can be read. The rollout of a revision that exists already continues, for its
    template was accepted before."""
    if engine_revision(service, settings, live=observed.revisions) in observed.revisions:
        steps = rollout(service, observed, settings, pace, now=now)
    else:
        steps = scale_current(observed, service.spec.replicas, now=now, timeout_s=service.planned_drain_s)
    budget = with_digest(desired_engine_budget(service))  # it counts the wanted replicas
    live = observed.children.get((budget["kind"], budget["metadata"]["name"]))
    changes = () if live is None else child_actions(service, observed, budget, live)
    return Steps((*steps.actions, *changes), steps.drain)
