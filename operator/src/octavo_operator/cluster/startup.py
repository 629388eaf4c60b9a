"""Durations of the phases of an engine pod's start, from the times in the pod's status.

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
    if container.get("restartCount"):
        return None
    created, rows = pod["metadata"].get("creationTimestamp"), pod.get("status", {}).get("conditions", ())
    became = {row["type"]: row.get("lastTransitionTime") for row in rows if row["status"] == "True"}
    started = container.get("state", {}).get("running", {}).get("startedAt")
    before, after = ("PodScheduled", "Initialized"), ("ContainersReady", "Ready")
    ends = (*map(became.get, before), started, *map(became.get, after))
    if created is None or None in ends:
        return None
    times = [datetime.fromisoformat(text) for text in (created, *ends)]
    seconds = [max(0, round((end - start).total_seconds())) for start, end in pairwise(times)]
    return Startup(created, tuple(seconds))
