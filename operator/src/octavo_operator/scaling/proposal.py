"""The count of replicas that the load of a service asks for, before it is stabilized and limited.

The source is `computeReplicasForMetrics` and `GetObjectPerPodMetricReplicas` in pkg/controller/podautoscaler of
Kubernetes 1.34. Floats are used where these functions use them, so that equal loads give equal counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from octavo_operator.scaling.behavior import Behavior
from octavo_operator.spec.quantity import target_to_milli, to_milli


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`sum`: the metric's value over all replicas; None: it is unknown. `average`: its target per replica, above 0."""

    name: str
    sum: float | None
    average: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """`replicas`: None if the count must not change, because the load is not known well enough."""

    replicas: int | None
    message: str


def propose(metrics: Sequence[Metric], replicas: int, status_replicas: int, behavior: Behavior) -> Proposal:
    """Propose the highest count that a known metric asks for; with an unknown metric none below `replicas`."""
    unknown = [metric.name for metric in metrics if metric.sum is None]
    counts = {m.name: _count(m.sum, m.average, status_replicas, behavior) for m in metrics if m.sum is not None}
    highest = max(counts, key=counts.__getitem__, default=None)
    if highest is None or (unknown and counts[highest] < replicas):
        names = ", ".join(unknown) or "the load"
        return Proposal(replicas=None, message=f"{names} is unknown, so the count stays {replicas}.")
    return Proposal(replicas=counts[highest], message=f"{highest} asks for {counts[highest]} replicas")


def _count(value: float, average: Decimal, status_replicas: int, behavior: Behavior) -> int:
    """Count by one metric. It is compared with `status.replicas`: pods that exist, not pods that are wanted."""
    used, target = to_milli(value), target_to_milli(average)
    if status_replicas:
        ratio = used / (float(target) * status_replicas)
        if 1.0 - behavior.scale_down.tolerance <= ratio <= 1.0 + behavior.scale_up.tolerance:
            return status_replicas
    return math.ceil(used / target)
