"""Holds back rollouts that only the operator's settings ask for, such as another default image: few services are rolled
out at a time, and no further one once such a rollout has exceeded its deadline.

The mark of such a rollout is the field `rollout.upgrade` of the status, until the rollout is complete.
"""

from collections.abc import Mapping
from typing import Any

from octavo_operator.observed import Observed
from octavo_operator.plan.rollout import Pace
from octavo_operator.service import InferenceService, Settings

#: The turn of this service comes without an event about it.
HELD_EVERY_S = 30.0


def is_upgrade(service: InferenceService, observed: Observed, wanted: str) -> bool:
    """Return whether another revision is wanted for a spec that the operator had processed before.

    A service of which no pod serves needs no turn: its rollout can interrupt nothing, and it may never complete.
    """
    status = observed.status
    if status.get("revision", {}).get("updated") == wanted:
        return bool(status.get("rollout", {}).get("upgrade"))
    return status.get("observedGeneration") == service.generation and any(pod.serves for pod in observed.pods)


def upgrade_reason(status: Mapping[str, Any]) -> str:
    """The reason of Progressing in the status of a service with the mark; empty without it."""
    is_marked = (status.get("rollout") or {}).get("upgrade")
    rows = status.get("conditions", ()) if is_marked else ()
    return next((str(row["reason"]) for row in rows if row["type"] == "Progressing"), "")


def held_pace(service: InferenceService, observed: Observed, settings: Settings, wanted: str) -> Pace | None:
    """Return the pace of a rollout that must wait for others; None if it may run. A service whose own rollout was
    stopped need not wait: otherwise two such services would wait for each other."""
    if wanted in observed.revisions or not observed.revisions or not is_upgrade(service, observed, wanted):
        return None
    others = observed.upgrades
    if others.stopped and upgrade_reason(observed.status) != "DeadlineExceeded":
        why = f"{others.stopped} exceeded its deadline in the rollout to the operator's new images or settings"
        return Pace(reason="UpgradeStopped", why=why)
    if others.num_running >= settings.max_rollouts:
        why = f"{others.num_running} services are being rolled out (operator.maxRollouts is {settings.max_rollouts})"
        return Pace(reason="UpgradeWaits", why=why)
    return None
