"""Converts a Kubernetes pod to `Pod`: its state and, if it does not start, its trouble with Kubernetes' message."""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from octavo_operator.names import (
    ADAPTER_LIST,
    ADMIN,
    ADMITTED_EPOCH,
    ADMITTED_GATE,
    DRAINING,
    ENGINE,
    REVISION_LABEL,
    ROUTER,
    ROUTER_PORT,
)
from octavo_operator.observed import Pod, Startup, Trouble

FETCH = "fetch"
#: Label of the pods of a LeaderWorkerSet.
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
#: Reason for which a container waits, in Kubernetes' status -> reason in our condition.
_WAITING: dict[str, Trouble] = {
    "ImagePullBackOff": "ImagePullError",
    "ErrImagePull": "ImagePullError",
    "InvalidImageName": "ImagePullError",
    "ErrImageNeverPull": "ImagePullError",
    "ImageInspectError": "ImagePullError",
    "CreateContainerConfigError": "ConfigError",
    "CreateContainerError": "ConfigError",
    "RunContainerError": "StartFailed",
}
_CRASHING = "CrashLoopBackOff"
_MISSING_SECRET = re.compile(r'\bsecret "([^"]+)" not found')

Raw = Mapping[str, Any]


class Failure(NamedTuple):
    """The cause of a container's failure. `code`: code in its termination message, such as OutOfMemory, or empty."""

    trouble: Trouble
    message: str
    code: str = ""


NODE_LOST = Failure("NodeLost", "its node reports nothing, so Kubernetes has marked the pod as not ready")


def pod_of(raw: Raw) -> Pod:
    metadata, status = raw["metadata"], raw.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    gate = conditions.get(ADMITTED_GATE, {})
    init, main = (_named(status.get(kind, ()), name) for kind, name in _CONTAINERS)
    is_lost = _is_lost(conditions)
    is_ready = conditions.get("ContainersReady", {}).get("status") == "True" and not is_lost
    is_admitted = gate.get("status") == "True"
    is_draining = (gate.get("status"), gate.get("reason")) == ("False", DRAINING)
    failure = NODE_LOST if is_lost else None if is_ready else _failure(status, conditions)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
        ordinal=_number(metadata.get("labels", {}).get(GROUP_INDEX, "")),
        is_ready=is_ready,
        is_pod_ready=conditions.get("Ready", {}).get("status") == "True",
        is_admitted=is_admitted,
        waits_since=_waits_since(conditions, failure),
        stuck_since=_stuck_since(conditions),
        has_node=conditions.get("PodScheduled", {}).get("status") == "True",
        draining_since=gate["lastTransitionTime"] if is_draining else None,
        has_ended=status.get("phase") in ("Failed", "Succeeded"),
        admitted_epoch=(metadata.get("annotations") or {}).get(ADMITTED_EPOCH) if is_admitted else None,
        adapter_list=(metadata.get("annotations") or {}).get(ADAPTER_LIST, ""),
        is_terminating="deletionTimestamp" in metadata,
        is_fetching="running" in init.get("state", {}),
        trouble=None if failure is None else failure.trouble,
        message="" if failure is None else failure.message,
        failure_code="" if failure is None else failure.code,
        restarts=main.get("restartCount", 0),
        startup=_startup_of(raw, main),
    )


def _number(text: str) -> int:
    """The number in a label; 0 for another text."""
    return int(text) if text.isdecimal() else 0


def _is_lost(conditions: Mapping[str, Raw]) -> bool:
    """Return whether Kubernetes has marked a pod as not ready because its node reports nothing.

    Kubernetes then changes only Ready. A kubelet gives such a pod only the reason ReadinessGatesNotReady.
    """
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    both = (ready.get("status"), containers.get("status"))
    return both == ("False", "True") and ready.get("reason") != "ReadinessGatesNotReady"


def _waits_since(conditions: Mapping[str, Raw], failure: Failure | None) -> str | None:
    is_unplaced = failure is not None and failure.trouble == "Unschedulable"
    return conditions["PodScheduled"].get("lastTransitionTime") if is_unplaced else None


def _stuck_since(conditions: Mapping[str, Raw]) -> str | None:
    """Time since which a pod with a node is not ready."""
    placed, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    if (placed.get("status"), ready.get("status")) != ("True", "False"):
        return None
    return max(filter(None, (row.get("lastTransitionTime") for row in (placed, ready))), default=None)


_CONTAINERS = (("initContainerStatuses", FETCH), ("containerStatuses", ENGINE))


def _failure(status: Raw, conditions: Mapping[str, Raw]) -> Failure | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return Failure("Unschedulable", scheduled.get("message", ""))
    failures = (
        _container_failure(_named(status.get(kind, ()), name), fetches=name == FETCH) for kind, name in _CONTAINERS
    )
    return next(filter(None, failures), None)


def _container_failure(container: Raw, *, fetches: bool) -> Failure | None:
    waiting = container.get("state", {}).get("waiting", {})
    reason = waiting.get("reason", "")
    ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated") or {}
    if reason in _WAITING:
        return Failure(_WAITING[reason], f"{reason}: {waiting.get('message', '')}")
    if ended.get("exitCode"):
        if ended.get("reason") == "OOMKilled":
            what = "the container needed more memory than its limit"
            if fetches:
                return Failure("FetchFailed", f"{what}: raise model.prefetch.resources.limits.memory")
            return Failure("OOMKilled", what)
        code, message = _termination_message(str(ended.get("message", "")))
        text = f"exit code {ended['exitCode']}" + (f": {message}" if message else "")
        return Failure("FetchFailed" if fetches else "CrashLoop", text, code)
    if reason == _CRASHING:
        return Failure("CrashLoop", waiting.get("message", ""))
    return None


def _termination_message(text: str) -> tuple[str, str]:
    """Code and message of a termination message, the JSON object that the `octavo` command writes.

    Any other text is the end of the log, which the kubelet stores if the command wrote nothing: it has no code, and its
    last line is the message.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict) and isinstance(message.get("code"), str) and isinstance(message.get("message"), str):
        return message["code"], message["message"]
    lines = [line for line in text.splitlines() if line.strip()]
    return "", lines[-1] if lines else ""


def _named(containers: Any, name: str) -> Raw:
    return next((c for c in containers if c.get("name") == name), {})


def router_trouble(raw: Raw) -> str:
    """The reason why a router pod does not start; empty if its status shows none."""
    if "deletionTimestamp" in raw["metadata"]:
        return ""
    status = raw.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"Unschedulable: {scheduled.get('message', '')}"
    for container in status.get("containerStatuses", ()):
        if (failure := _container_failure(container, fetches=False)) is not None:
            return f"{failure.trouble}: {failure.message}"
    return ""


def creation_failure(deployment: Raw) -> str:
    """The reason why a Deployment's pods can't be created (a quota, Pod Security, an admission webhook), or empty."""
    conditions = {c["type"]: c for c in deployment.get("status", {}).get("conditions", ())}
    failure = conditions.get("ReplicaFailure", {})
    return str(failure.get("message", "")) if failure.get("status") == "True" else ""


def is_quota_exceeded(failure: str) -> bool:
    """Return whether a reason of `creation_failure` is a ResourceQuota: Kubernetes says so only in the text."""
    return "exceeded quota" in failure


def missing_secrets(messages: Iterable[str]) -> frozenset[str]:
    """Return the names of Secrets that the kubelet did not find, from its messages about containers and volumes."""
    return frozenset(name for message in messages for name in _MISSING_SECRET.findall(message))


def state_port(raw: Raw) -> int:
    """Port on which a router pod serves its state stream: the admin port; in versions without one, the only port."""
    ports = _named(raw["spec"]["containers"], ROUTER).get("ports", ())
    return next((port["containerPort"] for port in ports if port.get("name") == ADMIN), ROUTER_PORT)


def is_serving_router(raw: Raw) -> bool:
    conditions = {c["type"]: c["status"] for c in raw.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in raw["metadata"]


def _startup_of(pod: Raw, container: Raw) -> Startup | None:
    """The phases of a pod that receives requests; None for any other pod, and for one whose container restarted, as its
    status has no times of the first start. `container`: status of the engine's container.

    Kubernetes' times have whole seconds, so each phase is right to a second, and so is their sum."""
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
