"""The conditions of a service, and the closed list of reasons that they can have.

Each condition is one requirement for Ready, in the order in which they become true; conditions of the wanted revision
don't block Ready in a rollout while enough replicas serve. docs/reference/conditions.md documents each reason and its
remedy; a test keeps that page and this list equal.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["True", "False", "Unknown"]

#: Condition -> reason -> status of the condition with this reason.
REASONS: dict[str, dict[str, Status]] = {
    "Accepted": {
        "Valid": "True",
        "ClaimIsForOneNode": "True",
        "ClaimDiffers": "True",
        "InvalidSpec": "False",
        "RouterNotFound": "False",
        "RouterNotAllowed": "False",
        "HostTaken": "False",
        "ModelNameTaken": "False",
        "NoGatewayApi": "False",
        "NoLeaderWorkerSets": "False",
        "PodTemplateConflict": "False",
        "PodTemplateRefused": "False",
        "UnusedGpus": "False",
        "TooFewGpus": "False",
        "TooFewCpus": "False",
        "StagesOnGpus": "False",
    },
    "ChildrenApplied": {
        "Applied": "True",
        "NotTried": "Unknown",
        "NameTaken": "False",
        "Refused": "False",
        "Retrying": "Unknown",
    },
    "FitsHardware": {"Fits": "True", "NotChecked": "Unknown", "TooLarge": "False", "NoGpuSupport": "False"},
    "ModelReady": {
        "Fetched": "True",
        "Fetching": "Unknown",
        "FetchFailed": "False",
        "NotFound": "False",
        "Waiting": "Unknown",
    },
    "WorkloadReady": {
        "PodsReady": "True",
        "ScaledToZero": "True",
        "Starting": "Unknown",
        "QuotaExceeded": "False",
        "PodRefused": "False",
        "Unschedulable": "False",
        "MountFailed": "False",
        "ImagePullError": "False",
        "ConfigError": "False",
        "CrashLoop": "False",
        "OOMKilled": "False",
        "StartFailed": "False",
        "NodeLost": "False",
    },
    "RouterReady": {
        "RouterServes": "True",
        "RouterDegraded": "True",
        "RouterStarting": "Unknown",
        "RouterFailed": "False",
    },
    "ReplicasAdmitted": {
        "AllAdmitted": "True",
        "Idle": "True",
        "WaitingForRouter": "Unknown",
        "NoReplicas": "False",
    },
    "Progressing": {
        "Complete": "False",
        "RollingOut": "True",
        "Paused": "Unknown",
        "NoRoomToSurge": "Unknown",
        "DeadlineExceeded": "False",
        "UpgradeWaits": "Unknown",
        "UpgradeStopped": "Unknown",
    },
    "ScalingReady": {
        "Active": "True",
        "AtMax": "True",
        "ScaledToZero": "True",
        "External": "True",
        "MetricsUnavailable": "Unknown",
        "ScaledByOthers": "False",
        "Disabled": "False",
    },
    "Ready": {"Serving": "True", "Idle": "True"},  # otherwise Ready has the reason of the condition that blocks it
}

#: Conditions that are no requirement of Ready.
INFORMATION = frozenset({"Progressing", "ScalingReady"})

#: Conditions of the wanted revision. Replicas of any revision serve, so a rollout that keeps enough keeps Ready.
OF_REVISION = frozenset({"FitsHardware", "ModelReady", "WorkloadReady"})

#: Reasons of conditions that are Unknown without blocking Ready.
NON_BLOCKING = frozenset({"NotChecked", "Retrying"})


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    reason: str
    message: str

    def __post_init__(self) -> None:
        known = REASONS[self.type]
        inherited = self.type == "Ready" and any(self.reason in reasons for reasons in REASONS.values())
        assert self.reason in known or inherited, f"{self.type} has no reason {self.reason}"

    @property
    def status(self) -> Status:
        if self.type == "Ready":
            return "True" if self.reason in REASONS["Ready"] else "False"
        return REASONS[self.type][self.reason]


def is_required(type_: str, reasons: Collection[str]) -> bool:
    """Return whether Ready requires this condition. `reasons`: of all conditions."""
    keeps_serving = "AllAdmitted" in reasons and "Complete" not in reasons
    return type_ not in INFORMATION and not (type_ in OF_REVISION and keeps_serving)


def ready(others: Iterable[Condition], *, message: str) -> Condition:
    """The condition Ready: True, or else with the reason of the first False condition or, without one, of the first
    Unknown condition."""
    conditions = tuple(others)
    reasons = {condition.reason for condition in conditions}
    required = [condition for condition in conditions if is_required(condition.type, reasons)]
    missing = [c for c in required if c.status != "True" and c.reason not in NON_BLOCKING]
    if not missing:
        idle = next((c for c in required if c.reason == "Idle"), None)
        return Condition("Ready", "Serving", message) if idle is None else Condition("Ready", "Idle", idle.message)
    first = next((c for c in missing if c.status == "False"), missing[0])
    return Condition("Ready", first.reason, first.message)


def with_transition_times(
    conditions: Iterable[Condition], before: Iterable[Mapping[str, Any]], *, generation: int, now: str
) -> list[dict[str, Any]]:
    """The conditions as entries of the status. A condition keeps its lastTransitionTime until its status changes."""
    earlier = {condition["type"]: condition for condition in before}
    rows = []
    for condition in conditions:
        old = earlier.get(condition.type, {})
        since = old.get("lastTransitionTime") if old.get("status") == condition.status else None
        rows.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": since or now,
                "observedGeneration": generation,
            }
        )
    return rows
