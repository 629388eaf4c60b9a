"""What people are told of a service, as Kubernetes Events: turns of its conditions, and acts that they may wonder at.

A turn is told once, when a condition's reason becomes another than status has it; so a look that finds nothing new
tells nothing, and neither does an operator that starts anew. Steps that only take time are left to the conditions.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo_operator.plan.actions import Action, Apply, SetGate
from octavo_operator.plan.conditions import Condition

#: Reasons that are told when they come to hold, though nothing was wrong before.
MILESTONES = frozenset({"Fetching", "Fetched", "RollingOut", "Complete", "Serving"})
#: What isn't so, and isn't wrong either.
HARMLESS = frozenset({"Complete", "NoReplicas"})
#: What holds, and is wrong all the same.
WRONG = frozenset({"RouterDegraded"})
#: Reasons of acts.
ACT_REASONS = ("ChildRepaired", "ReplicaAdmitted", "ReplicaWithdrawn")


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """`action`: what was done, or what was looked at."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str
    action: str


def condition_events(conditions: Iterable[Condition], before: Iterable[Mapping[str, Any]]) -> Iterator[ServiceEvent]:
    known = {row["type"]: row for row in before}
    for condition in conditions:
        old = known.get(condition.type, {})
        if old.get("reason") == condition.reason or (condition.type == "Ready" and condition.status != "True"):
            continue
        is_wrong = condition.reason in WRONG or (condition.status == "False" and condition.reason not in HARMLESS)
        is_mended = old.get("status") == "False" and condition.type != "Progressing" and condition.status == "True"
        if is_wrong or is_mended or condition.reason in MILESTONES:
            yield ServiceEvent("Warning" if is_wrong else "Normal", condition.reason, condition.message, condition.type)


def action_event(action: Action) -> ServiceEvent | None:
    match action:
        case Apply(manifest, reason, repairs=True):
            note = f"{manifest['kind']} {manifest['metadata']['name']}: {reason}"
            return ServiceEvent("Normal", "ChildRepaired", note, "Repair")
        case SetGate(pod, _, None, reason):
            return ServiceEvent("Warning", "ReplicaWithdrawn", f"{pod} gets no requests: {reason}", "Withdraw")
        case SetGate(pod, _, _, reason):
            return ServiceEvent("Normal", "ReplicaAdmitted", f"{pod} gets requests: {reason}", "Admit")
    return None
