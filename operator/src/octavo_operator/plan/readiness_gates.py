"""Opens the readiness gate of an engine pod once every router has the pod's KV snapshot, and closes it for a drain.

A gate is open for one epoch: one engine process, which sent the snapshot. The restart of a router closes no gate: the
router fetches the snapshots while the pods keep serving. The restart of an engine within its pod closes the pod's gate,
as the admitted process has ended.
"""

from collections.abc import Iterator, Set

from octavo_operator.observed import Observed, Pod
from octavo_operator.plan.actions import SetGate


def gate_actions(observed: Observed, leaving: Set[str]) -> Iterator[SetGate]:
    """`leaving`: names of pods that shall be drained. A drained pod that is not among them is admitted again."""
    for pod in observed.pods:
        if pod.is_terminating or pod.has_ended:
            continue
        if pod.name in leaving:
            if pod.is_admitted:
                yield SetGate(pod.name, pod.uid, None, "it finishes its requests and is then removed", drains=True)
            continue
        epochs = _epochs(observed, pod)
        agreed = next(iter(epochs)) if len(epochs) == 1 else None
        if agreed is not None and pod.is_ready and (not pod.is_admitted or pod.admitted_epoch != agreed):
            yield SetGate(pod.name, pod.uid, agreed, "every router has its KV snapshot")
        elif pod.is_admitted and agreed != pod.admitted_epoch and _is_another(epochs, pod):
            yield SetGate(pod.name, pod.uid, None, "its engine was restarted")


def _epochs(observed: Observed, pod: Pod) -> set[str | None]:
    """Epochs of this pod's snapshots in the routers; None for a router that has no snapshot or has not reported."""
    return {None if report is None else report.admitted.get(pod.name) for report in observed.routers.values()}


def _is_another(epochs: set[str | None], pod: Pod) -> bool:
    """Return whether a router has another epoch than the admitted one; False for a pod that an older operator admitted
    without an epoch."""
    return pod.admitted_epoch is not None and any(epoch not in (None, pod.admitted_epoch) for epoch in epochs)
