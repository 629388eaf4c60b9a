"""`PodSetupEvents`: finds out why a pod has no containers, for example because of a volume from a missing Secret, and
why a StatefulSet lacks pods, for example because of a quota.

Kubernetes reports such failures in Events only; the status of the pod or the StatefulSet does not show them. Events are
not watched: those of a pod that waits longer than `FIRST_LOOK_S` are listed every `NEXT_LOOK_S` seconds. A failure
counts if it recurs or if the pod waits for long: a normal start may have one, as when the kubelet's cache does not know
a new Secret yet.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.cluster.client import Cluster

FIRST_LOOK_S = 2.0
NEXT_LOOK_S = 4.0
MIN_OCCURRENCES = 3  # the kubelet repeats a failed mount after 0.5, 1 and 2 s
LONG_WAIT_S = 20.0
EARLIER = "FailedScheduling"  # reason of a Warning that is over once the pod has a node
EXPIRY_S = 60.0  # a pod for which `refresh` was not called for so long is gone
NO_SETS: Mapping[tuple[str, str], str | None] = {}
_SECOND = len("2026-01-01T00:00:00")
_IDLE = ("ContainerCreating", "PodInitializing")

Raw = Mapping[str, Any]


@dataclass(slots=True)
class PendingPod:
    since_s: float
    next_look_s: float
    message: str = ""


class PodSetupEvents:
    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._pending: dict[str, PendingPod] = {}  # by uid of a pod, or by namespace and name of a StatefulSet

    async def refresh(self, pods: Iterable[Raw], sets: Mapping[tuple[str, str], str | None] = NO_SETS) -> float | None:
        """List the Events of waiting pods and StatefulSets; return the seconds until the next call is due, or None if
        nothing waits. `sets`: as `View.stateful_sets`. A StatefulSet's failure that is older than its newest pod is
        ignored: it is over, or of an earlier set of the same name."""
        now, delays_s = self._clock(), list[float]()
        self._pending = {uid: pod for uid, pod in self._pending.items() if pod.next_look_s > now - EXPIRY_S}
        looks: list[tuple[str, dict[str, str], str | None]] = []
        for pod in pods:
            regarding = {"uid": pod["metadata"]["uid"]}
            looks.append((pod["metadata"]["namespace"], regarding, "" if is_starting_containers(pod) else None))
        looks += [(place, {"kind": "StatefulSet", "name": name}, since) for (place, name), since in sets.items()]
        for namespace, regarding, since in looks:
            key = regarding.get("uid") or f"{namespace}/{regarding['name']}"
            if since is None:
                self._pending.pop(key, None)
                continue
            pending = self._pending.setdefault(key, PendingPod(now, now + FIRST_LOOK_S))
            if pending.next_look_s <= now:
                pending.next_look_s = now + NEXT_LOOK_S
                is_long = now - pending.since_s >= LONG_WAIT_S
                found = await self._cluster.list_warnings(namespace, **regarding)
                pending.message = _lasting_failure(found, since, is_long=is_long) or pending.message
            delays_s.append(pending.next_look_s - now)
        return min(delays_s, default=None)

    def trouble_of(self, key: str) -> str:
        """The lasting failure of a pod, by its uid, or of a StatefulSet, by `NAMESPACE/NAME`; empty if it has none."""
        pending = self._pending.get(key)
        return "" if pending is None else pending.message


def _lasting_failure(warnings: Iterable[Raw], since: str, *, is_long: bool) -> str:
    seen = [event for event in warnings if not last_seen(event) or last_seen(event)[:_SECOND] >= since[:_SECOND]]
    current = [event for event in seen if event["reason"] != EARLIER]
    lasting = [event for event in current if is_long or num_occurrences(event) >= MIN_OCCURRENCES]
    latest = max(lasting, key=last_seen, default=None)
    return "" if latest is None else f"{latest['reason']}: {latest.get('note', '')}"


def is_starting_containers(pod: Raw) -> bool:
    """Return whether the pod has a node, and none of its containers has started or has an error."""
    status = pod.get("status", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    if conditions.get("PodScheduled") != "True" or conditions.get("PodReadyToStartContainers") == "True":
        return False
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return all(c.get("state", {}).get("waiting", {}).get("reason") in _IDLE for c in containers)


def num_occurrences(event: Raw) -> int:
    return int((event.get("series") or {}).get("count") or event.get("deprecatedCount") or 1)


def last_seen(event: Raw) -> str:
    """Time of the last occurrence of an Event (events.k8s.io), also from deprecated fields; empty if none is set."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("deprecatedLastTimestamp") or event.get("eventTime") or "")
