"""Derives from a service, its pods and events why the service is not ready. Pure.

The cause is the first condition that is False, otherwise the first that is Unknown, as for `Ready` (plan.conditions).
If the operator has not written the status yet, that is the cause.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.cluster.pod_events import last_seen, num_occurrences
from octavo_operator.cluster.pods import is_serving_router, pod_of, router_trouble
from octavo_operator.explain.meanings import MEANINGS, Meaning
from octavo_operator.names import COMPONENT_LABEL, ENGINE_WORKER, ROUTER
from octavo_operator.plan.conditions import INFORMATION, NON_BLOCKING, REASONS, is_required

Raw = Mapping[str, Any]
MAX_EVENTS = 8
_ASIDE = (*INFORMATION, "Ready")
_COMMAND = re.compile(r"`(kubectl [^`]+)`")
_ABOUT_ROUTERS = ("RouterReady", "ReplicasAdmitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One condition that Ready requires. `state`: holds (True), fails (False), waits (Unknown), open (not checked), or
    unknown (not in the status yet)."""

    condition: str
    state: str
    reason: str = ""
    message: str = ""
    since: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    condition: str
    reason: str
    message: str
    meaning: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    name: str
    component: str
    state: str
    message: str = ""
    restarts: int = 0
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    when: str
    kind: str  # Normal or Warning
    about: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    name: str
    namespace: str
    model: str
    url: str
    replicas: str
    is_ready: bool
    chain: tuple[Link, ...]
    cause: Cause | None
    scaling: Cause | None = None  # why autoscaling wants this number of replicas
    pods: tuple[PodState, ...] = ()
    events: tuple[Event, ...] = ()
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())  # which data could not be read, and why


def explain_service(
    service: Raw, pods: Sequence[Raw] = (), events: Sequence[Raw] = (), notes: Iterable[str] = ()
) -> Explanation:
    metadata, status = service["metadata"], service.get("status") or {}
    chain = tuple(_chain(status.get("conditions", ())))
    cause = _cause(service, chain)
    states = tuple(sorted((pod_state(pod) for pod in pods), key=lambda pod: (pod.component, pod.name)))
    name, namespace = metadata["name"], metadata["namespace"]
    return Explanation(
        name=name,
        namespace=namespace,
        model=str(service.get("spec", {}).get("model", {}).get("uri", "")),
        url=status.get("url", ""),
        replicas=(status.get("replicas") or {}).get("summary", ""),
        is_ready=cause is None,
        chain=chain,
        cause=cause,
        scaling=_scaling(status.get("conditions", ())),
        pods=states,
        events=_latest(events),
        commands=tuple(dict.fromkeys(_commands(name, namespace, cause, states))),
        notes=tuple(notes),
    )


def pods_in_trouble(pods: Iterable[PodState]) -> list[PodState]:
    return [pod for pod in pods if pod.state not in ("serves", "ends")]


def _chain(conditions: Sequence[Raw]) -> Iterator[Link]:
    rows = {condition["type"]: condition for condition in conditions}
    for name in (name for name in REASONS if name not in _ASIDE):
        row = rows.get(name)
        if row is None:
            yield Link(condition=name, state="unknown")
            continue
        blocked = "fails" if row["status"] == "False" else "waits"
        otherwise = "open" if row["reason"] in NON_BLOCKING else blocked
        yield Link(
            condition=name,
            state="holds" if row["status"] == "True" else otherwise,
            reason=row["reason"],
            message=row.get("message", ""),
            since=row.get("lastTransitionTime", ""),
        )


def _cause(service: Raw, chain: Sequence[Link]) -> Cause | None:
    metadata, status = service["metadata"], service.get("status") or {}
    if "deletionTimestamp" in metadata:
        return Cause(condition="", reason="Deleted", message=f"since {metadata['deletionTimestamp']}", **_DELETED)
    seen, generation = status.get("observedGeneration", 0), metadata.get("generation", 0)
    if seen < generation:
        message = f"the spec has generation {generation}, the operator has processed {seen or 'none'}"
        return Cause(condition="", reason="NotSeen", message=message, **_NOT_SEEN)
    reasons = {row["reason"] for row in status.get("conditions", ())}
    required = (link for link in chain if is_required(link.condition, reasons))
    blocking = [link for link in required if link.state in ("fails", "waits")]
    if not blocking:
        return None
    first = next((link for link in blocking if link.state == "fails"), blocking[0])
    return _explained(first.condition, first.reason, first.message)


def _scaling(conditions: Sequence[Raw]) -> Cause | None:
    rows = (row for row in conditions if row["type"] == "ScalingReady")
    return next((_explained(row["type"], row["reason"], row.get("message", "")) for row in rows), None)


def _explained(condition: str, reason: str, message: str) -> Cause:
    meaning = MEANINGS[condition].get(reason, _UNKNOWN)
    return Cause(condition=condition, reason=reason, message=message, meaning=meaning.text, remedy=meaning.remedy)


_UNKNOWN = Meaning(
    "This version of octavo doesn't know the reason.", "Use the octavo command of the operator's version."
)
_DELETED = {"meaning": "The service is being deleted.", "remedy": "Its pods end when their requests are done."}
_NOT_SEEN = {
    "meaning": "No operator manages this service, or the service has just been changed.",
    "remedy": "If this lasts: `kubectl get pods -A -l app.kubernetes.io/name=octavo-operator` shows whether an "
    "operator runs; it may watch other namespaces only.",
}


def pod_state(raw: Raw) -> PodState:
    labels = raw["metadata"].get("labels", {})
    component = labels.get(COMPONENT_LABEL, "")
    if component == ROUTER:
        message = router_trouble(raw)
        state = "serves" if is_serving_router(raw) else "fails" if message else "starts"
        restarts = sum(c.get("restartCount", 0) for c in raw.get("status", {}).get("containerStatuses", ()))
    else:
        pod = pod_of(raw)
        waiting = "waits for the router" if pod.is_ready else "fetches the model" if pod.is_fetching else "starts"
        serves = pod.serves or (component == ENGINE_WORKER and pod.is_ready)
        state = "serves" if serves else pod.trouble or waiting
        message, restarts = pod.message, pod.restarts
    if "deletionTimestamp" in raw["metadata"]:
        state = "ends"
    name = raw["metadata"]["name"]
    return PodState(name=name, component=component, state=state, message=message, restarts=restarts)


def _latest(events: Iterable[Raw]) -> tuple[Event, ...]:
    rows = sorted(events, key=_when)[-MAX_EVENTS:]
    return tuple(
        Event(
            when=_when(event),
            kind=event.get("type") or "Normal",
            about="/".join(about_of(event)),
            reason=event.get("reason") or "",
            message=" ".join((event.get("note") or "").split()),
            count=num_occurrences(event),
        )
        for event in rows
    )


def about_of(event: Raw) -> tuple[str, str]:
    """Kind and name of the object to which an Event refers."""
    about = event.get("regarding") or {}
    return about.get("kind", ""), about.get("name", "")


def _when(event: Raw) -> str:
    return str(last_seen(event) or event["metadata"]["creationTimestamp"]).partition(".")[0].rstrip("Z") + "Z"


def _commands(name: str, namespace: str, cause: Cause | None, pods: Sequence[PodState]) -> Iterator[str]:
    """The commands in the remedy, with names filled in, then commands that help in every case."""
    if cause is None:
        return
    suspects = pods_in_trouble(pods)
    component = ROUTER if cause.condition in _ABOUT_ROUTERS else ""
    suspects.sort(key=lambda pod: pod.state != cause.reason)
    suspects.sort(key=lambda pod: pod.component != component if component else pod.component == ROUTER)
    pod = suspects[0].name if suspects else None
    for command in _COMMAND.findall(cause.remedy):
        if "POD" not in command or pod is not None:
            filled = re.sub(r"\bNAME\b", name, re.sub(r"\bPOD\b", pod or "", command))
            yield filled if " -A" in filled else f"{filled} -n {namespace}"
    if pod is not None:
        yield f"kubectl describe pod {pod} -n {namespace}"
        if suspects[0].restarts:
            yield f"kubectl logs {pod} --previous -n {namespace}"
    yield f"kubectl describe infsvc {name} -n {namespace}"
