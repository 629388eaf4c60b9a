"""How long the start of an engine pod took, by phase, from the times in the pod's status.

Kubernetes' times have whole seconds, so each phase is right to a second, and so is their sum.
"""

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from octavo_operator.observed import Startup

Raw = Mapping[str, Any]


def startup_of(pod: Raw, container: Raw) -> Startup | None:
    """The phases of a pod that receives requests; None for any other pod, and for one whose container restarted, as its
    status has no times of the first start. `container`: status of the engine's container."""
    metadata, rows = pod["metadata"], {row["type"]: row for row in pod["status"].get("conditions", ())}
    running = container.get("state", {}).get("running", {})
    if rows.get("Ready", {}).get("status") != "True" or container.get("restartCount") or "startedAt" not in running:
        return None
    ends = [rows[name].get("lastTransitionTime") for name in ("PodScheduled", "Initialized") if name in rows]
    ends += [
        running["startedAt"],
        *(rows[n].get("lastTransitionTime") for n in ("ContainersReady", "Ready") if n in rows),
    ]
    if len(ends) != len(Startup.PHASES) or not all(ends):
        return None
    times = [datetime.fromisoformat(text) for text in (metadata["creationTimestamp"], *ends)]
    seconds = [max(0, round((after - before).total_seconds())) for before, after in pairwise(times)]
    return Startup(metadata["creationTimestamp"], tuple(seconds))
