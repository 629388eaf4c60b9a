"""Kubernetes Events about a service: transitions of its conditions, and actions that may surprise its owner.

A transition is a difference between a condition's reason and the reason in the status; it yields one event. So neither
an unchanged service nor a restarted operator repeats an event. Steps that merely take time yield no event.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo_operator.plan.actions import Action, Apply, SetGate
from octavo_operator.plan.conditions import Condition

#: Reasons that yield an event even if nothing was wrong before.
MILESTONES = frozenset({"Fetching", "Fetched", "RollingOut", "Complete", "Serving"})
#: Reasons of conditions that are False without anything being wrong.
HARMLESS = frozenset({"Complete", "NoReplicas"})
#: Reasons of conditions that are True although something is wrong.
WRONG = frozenset({"RouterDegraded"})
#: Reasons of events that report actions.
ACT_REASONS = ("ChildRepaired", "ReplicaAdmitted", "ReplicaDraining", "ReplicaWithdrawn")


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """A Kubernetes Event. `action`: kind of the operator's action, or type of the condition that has changed."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str
    action: str


def condition_events(conditions: Iterable[Condition], before: Iterable[Mapping[str, Any]]) -> Iterator[ServiceEvent]:
    rows = {row["type"]: row for row in before}
    for condition in conditions:
        old = rows.get(condition.type, {})
        if old.get("reason") == condition.reason or (condition.type == "Ready" and condition.status != "True"):
            continue
        is_wrong = condition.reason in WRONG or (condition.status == "False" and condition.reason not in HARMLESS)
        is_recovered = old.get("status") == "False" and condition.type != "Progressing" and condition.status == "True"
        if is_wrong or is_recovered or condition.reason in MILESTONES:
            yield ServiceEvent("Warning" if is_wrong else "Normal", condition.reason, condition.message, condition.type)


def action_event(action: Action) -> ServiceEvent | None:
    match action:
        case Apply(manifest, reason, repairs=True):
            note = f"{manifest['kind']} {manifest['metadata']['name']}: {reason}"
            return ServiceEvent("Normal", "ChildRepaired", note, "Repair")
        case SetGate(pod, _, None, reason, drains=True):
            return ServiceEvent("Normal", "ReplicaDraining", f"{pod} receives no new requests: {reason}", "Drain")
        case SetGate(pod, _, None, reason):
            return ServiceEvent("Warning", "ReplicaWithdrawn", f"{pod} receives no requests: {reason}", "Withdraw")
        case SetGate(pod, _, _, reason):
            return ServiceEvent("Normal", "ReplicaAdmitted", f"{pod} receives requests: {reason}", "Admit")
    return None
