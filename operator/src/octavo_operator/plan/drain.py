"""Drains engine pods before they are removed: they get no new requests, and finish the running ones.

The mark is the pod's readiness gate, False with reason Draining: the pod becomes unready, so routers send it nothing,
and its Deployment removes it before serving ones. Everything derives from the present state: after the death of an
operator the next one continues, and a pod that stays after all is admitted again.

The order in which a Deployment removes unready pods can't be chosen, so it is scaled once all pods that shall go are
drained. A LeaderWorkerSet removes the pods with the highest ordinals, ready or not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo_operator.names import GROUP_SET
from octavo_operator.observed import EngineDeployment, Observed, Pod
from octavo_operator.timestamps import seconds_since


@dataclass(frozen=True, slots=True)
class DrainStep:
    """`leaving`: names of pods that get no requests. `busy`: those of them whose requests may still run. `replicas`:
    the number that each Deployment may be scaled to now."""

    leaving: frozenset[str]
    busy: frozenset[str]
    replicas: Mapping[str, int]


def drain(observed: Observed, targets: Mapping[str, int], *, timeout_s: int, now: str) -> DrainStep:
    """`targets`: wanted replicas by the name of the Deployment; one that isn't named keeps its replicas. `timeout_s`:
    longest drain. `now`: RFC 3339."""
    leaving: set[str] = set()
    all_busy: set[str] = set()
    replicas = {}
    for deployment in observed.engine_deployments:
        if deployment.is_deleting:  # by a user; its pods may stay, and get another Deployment
            continue
        target = targets.get(deployment.name, deployment.replicas)
        pods = [pod for pod in observed.staying_pods if pod.revision == deployment.revision]
        first, candidates = _pods_to_remove(deployment, pods, target, observed)
        busy = {pod.name for pod in candidates if _is_busy(observed, pod, timeout_s=timeout_s, now=now)}
        replicas[deployment.name] = max(target, deployment.replicas) if busy else target
        if deployment.kind == GROUP_SET or len(pods) <= deployment.replicas:
            leaving |= {pod.name for pod in first}
        else:  # the Deployment is about to remove unready pods: none that has requests may become unready
            leaving |= {pod.name for pod in first if not pod.serves}
        all_busy |= busy
    return DrainStep(frozenset(leaving), frozenset(all_busy), replicas)


def _pods_to_remove(
    deployment: EngineDeployment, pods: list[Pod], target: int, observed: Observed
) -> tuple[list[Pod], list[Pod]]:
    """The pods that shall go, and those that may go instead of them."""
    if deployment.kind == GROUP_SET:
        highest = [pod for pod in pods if pod.ordinal >= target]
        return highest, highest
    first = _first(pods, max(0, len(pods) - target), observed)
    return first, [pod for pod in pods if first and (pod in first or not pod.is_pod_ready)]


def _first(pods: Iterable[Pod], count: int, observed: Observed) -> list[Pod]:
    """The `count` pods to remove: first those that don't serve, which a Deployment removes first, then those that drain
    already, then those whose cache is worth least to the routers."""

    def rank(pod: Pod) -> tuple[int, int, str]:
        reports = filter(None, observed.routers.values())
        worth = sum(report.worth_tokens.get(pod.name, 0) for report in reports)
        return (2 if pod.serves else 1 if pod.draining_since else 0), worth, pod.name

    return sorted(pods, key=rank)[:count]


def _is_busy(observed: Observed, pod: Pod, *, timeout_s: int, now: str) -> bool:
    """Return whether requests may run on the pod. A pod that is not ready, as on a lost node, can't finish them."""
    if not pod.is_ready or not (pod.is_admitted or pod.draining_since):
        return False
    if pod.draining_since is not None and seconds_since(pod.draining_since, now) >= timeout_s:
        return False
    routers = observed.routers.values()
    if pod.serves or any(report is None or pod.name in report.sends_to for report in routers):
        return True
    reports = (*routers, *observed.leaving_routers.values())
    return any(report is not None and report.in_flight.get(pod.name, 0) for report in reports)
