"""The readiness gate of engine pods: open once every router has the pod's KV snapshot.

It is keyed to the epoch of the engine whose snapshot that was. A router that restarts closes nothing: it catches up
with pods that serve meanwhile. An engine that restarts within its pod does: what was admitted is gone.
"""

from collections.abc import Iterator

from octavo_operator.observed import Observed, Pod
from octavo_operator.plan.actions import SetGate


def gate_actions(observed: Observed) -> Iterator[SetGate]:
    for pod in observed.pods:
        if pod.is_terminating:
            continue
        epochs = _epochs(observed, pod)
        agreed = next(iter(epochs)) if len(epochs) == 1 else None
        if agreed is not None and pod.is_ready and (not pod.is_admitted or pod.admitted_epoch != agreed):
            yield SetGate(pod.name, pod.uid, agreed, "every router has its KV snapshot")
        elif pod.is_admitted and agreed != pod.admitted_epoch and _is_another(epochs, pod):
            yield SetGate(pod.name, pod.uid, None, "its engine was started anew")


def _epochs(observed: Observed, pod: Pod) -> set[str | None]:
    """What routers have of it; None stands for a router that has nothing, or hasn't said yet."""
    return {None if report is None else report.admitted.get(pod.name) for report in observed.routers.values()}


def _is_another(epochs: set[str | None], pod: Pod) -> bool:
    return any(epoch not in (None, pod.admitted_epoch) for epoch in epochs)
