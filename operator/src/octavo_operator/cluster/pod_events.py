"""`PodSetup`: why pods get no containers. What the kubelet can't set up for a pod, a volume of a Secret that isn't
there above all, it says in events alone: the pod's own status only waits.

Nobody watches events for that. A service with a pod that waits longer than pods do is looked at every few seconds.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.cluster.client import Cluster

FIRST_LOOK_S = 2.0
NEXT_LOOK_S = 4.0
EXPIRY_S = 60.0  # a pod that isn't asked about any more is gone
_IDLE = ("ContainerCreating", "PodInitializing")

Raw = Mapping[str, Any]


@dataclass(slots=True)
class PendingPod:
    look_s: float  # when
    message: str = ""


class PodSetupEvents:
    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._pending: dict[str, PendingPod] = {}  # by uid

    async def refresh(self, pods: Iterable[Raw]) -> float | None:
        """Seconds after which to come back; None when no pod waits."""
        now, again = self._clock(), list[float]()
        self._pending = {uid: wait for uid, wait in self._pending.items() if wait.look_s > now - EXPIRY_S}
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if not is_starting_containers(pod):
                self._pending.pop(uid, None)
                continue
            wait = self._pending.setdefault(uid, PendingPod(now + FIRST_LOOK_S))
            if wait.look_s <= now:
                wait.look_s = now + NEXT_LOOK_S
                wait.message = await self._ask(pod) or wait.message
            again.append(wait.look_s - now)
        return min(again, default=None)

    def trouble_of(self, uid: str) -> str:
        wait = self._pending.get(uid)
        return "" if wait is None else wait.message

    async def _ask(self, pod: Raw) -> str:
        found = await self._cluster.list_warnings(pod["metadata"]["namespace"], pod["metadata"]["uid"])
        latest = max(found, key=last_seen, default=None)
        return "" if latest is None else f"{latest['reason']}: {latest.get('note', '')}"


def is_starting_containers(pod: Raw) -> bool:
    """It has a node, and no container that was started, or that says why not."""
    status = pod.get("status", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    if conditions.get("PodScheduled") != "True" or conditions.get("PodReadyToStartContainers") == "True":
        return False
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return all(c.get("state", {}).get("waiting", {}).get("reason") in _IDLE for c in containers)


def last_seen(event: Raw) -> str:
    """Of events.k8s.io, where those of older writers have deprecated fields; empty if nobody says."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("deprecatedLastTimestamp") or event.get("eventTime") or "")
