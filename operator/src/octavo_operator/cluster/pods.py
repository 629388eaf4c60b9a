"""Converts a Kubernetes pod to `Pod`: whether it is ready, and otherwise the trouble with Kubernetes' message."""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo_operator.names import ADMIN, ADMITTED_GATE, ENGINE, REVISION_LABEL, ROUTER, ROUTER_PORT
from octavo_operator.observed import Pod, Trouble

FETCH = "fetch"
#: Kubernetes' reason why a container waits -> the reason in the condition.
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

Raw = Mapping[str, Any]


def pod_of(raw: Raw) -> Pod:
    metadata, status = raw["metadata"], raw.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    gate = conditions.get(ADMITTED_GATE, {})
    trouble, message = _trouble(status, conditions)
    init, main = (_named(status.get(kind, ()), name) for kind, name in _CONTAINERS)
    is_ready = conditions.get("ContainersReady", {}).get("status") == "True"
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
        is_ready=is_ready,
        is_admitted=gate.get("status") == "True",
        admitted_epoch=gate.get("message") if gate.get("status") == "True" else None,
        is_terminating="deletionTimestamp" in metadata,
        is_fetching="running" in init.get("state", {}),
        trouble=None if is_ready else trouble,
        message="" if is_ready else message,
        restarts=main.get("restartCount", 0),
    )


_CONTAINERS = (("initContainerStatuses", FETCH), ("containerStatuses", ENGINE))


def _trouble(status: Raw, conditions: Mapping[str, Raw]) -> tuple[Trouble | None, str]:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return "Unschedulable", scheduled.get("message", "")
    for kind, name in _CONTAINERS:
        for found in _container_trouble(_named(status.get(kind, ()), name), fetches=name == FETCH):
            return found
    return None, ""


def _container_trouble(container: Raw, *, fetches: bool) -> Iterator[tuple[Trouble, str]]:
    waiting = container.get("state", {}).get("waiting", {})
    reason = waiting.get("reason", "")
    ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated") or {}
    if reason in _WAITING:
        yield _WAITING[reason], f"{reason}: {waiting.get('message', '')}"
    elif ended.get("exitCode"):
        if ended.get("reason") == "OOMKilled":
            yield "OOMKilled", "it needed more memory than its limit"
        yield "FetchFailed" if fetches else "CrashLoop", _last_words(ended)
    elif reason == _CRASHING:
        yield "CrashLoop", waiting.get("message", "")


def _last_words(ended: Raw) -> str:
    """The end of the log, which the kubelet keeps for containers that fail: its last line says why."""
    lines = [line for line in str(ended.get("message", "")).splitlines() if line.strip()]
    return f"exit code {ended['exitCode']}" + (f": {lines[-1]}" if lines else "")


def _named(containers: Any, name: str) -> Raw:
    return next((c for c in containers if c.get("name") == name), {})


def router_trouble(raw: Raw) -> str:
    """Why a router pod does not start; empty if unknown."""
    if "deletionTimestamp" in raw["metadata"]:
        return ""
    status = raw.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"Unschedulable: {scheduled.get('message', '')}"
    for container in status.get("containerStatuses", ()):
        for trouble, message in _container_trouble(container, fetches=False):
            return f"{trouble}: {message}"
    return ""


def creation_failure(deployment: Raw) -> str:
    """Why a Deployment's pods can't be created: a quota, Pod Security, an admission webhook."""
    conditions = {c["type"]: c for c in deployment.get("status", {}).get("conditions", ())}
    failure = conditions.get("ReplicaFailure", {})
    return str(failure.get("message", "")) if failure.get("status") == "True" else ""


def state_port(raw: Raw) -> int:
    """Port of a router pod's state stream: the admin port, or the only port in versions without an admin port."""
    ports = _named(raw["spec"]["containers"], ROUTER).get("ports", ())
    return next((port["containerPort"] for port in ports if port.get("name") == ADMIN), ROUTER_PORT)


def is_serving_router(raw: Raw) -> bool:
    conditions = {c["type"]: c["status"] for c in raw.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in raw["metadata"]
