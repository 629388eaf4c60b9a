"""Broken services: each gets a condition and an event with the reason within 10 s; other services are not affected."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from threading import Event
from typing import Any

import pytest
from octavo_e2e.cluster import Cluster, Raw, Step, condition, exposed

HOST, FINE = "fine.example.test", "fine"
WITHIN_S, POLL_S, LIMIT_S = 10, 0.5, 240
NOWHERE = "http://127.0.0.1:9"
TINY = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "1Gi"}}
BESIDE_FINE = {"router": {"ref": {"name": FINE}}, "resources": TINY}
HUB = {"uri": "hf://missing/nothing"}


@dataclass(frozen=True)
class Broken:
    """`signal`: kind and text by which Kubernetes reports the fault: an event, a terminated container or a Deployment
    without pods; None: the service itself is the fault. `says`: part of the condition's message.
    """

    name: str
    spec: Raw
    reason: str
    says: str
    signal: tuple[str, str] | None = None
    of: str = "Ready"
    where: str = "open"
    signal_times: set[datetime] = field(default_factory=set, compare=False)
    event_times: set[datetime] = field(default_factory=set, compare=False)
    messages: list[str] = field(
        default_factory=list, compare=False
    )  # of the condition, once it has the expected reason


BROKEN = (
    Broken(
        "no-image",
        {"engine": {"image": "octavo.invalid/none:1"}},
        "ImagePullError",
        "octavo.invalid/none:1",
        ("Event", "Failed to pull image"),
    ),
    Broken("no-file", {"model": {"uri": "file:///nowhere"}}, "NotFound", "no such file", ("Pod", "no such file")),
    Broken(
        "no-package", {"model": {"uri": "pkg://octavo-nothing"}}, "NotFound", "not installed", ("Pod", "not installed")
    ),
    Broken(
        "no-claim",
        {"model": {"uri": "pvc://nothing/x"}},
        "Unschedulable",
        '"nothing" not found',
        ("Event", "not found"),
    ),
    Broken(
        "no-hub",
        {"model": HUB | {"secretRef": {"name": "to-nowhere"}}},
        "FetchFailed",
        "missing/nothing",
        ("Pod", "exit code 1"),
    ),
    Broken(
        "no-bucket",
        {"model": {"uri": "s3://nowhere/x", "secretRef": {"name": "to-nowhere"}}},
        "FetchFailed",
        "nowhere",
        ("Pod", "exit code 1"),
    ),
    Broken(
        "no-token",
        {"model": HUB | {"secretRef": {"name": "no-token"}}},
        "ConfigError",
        '"no-token" not found',
        ("Event", "no-token"),
    ),
    Broken(
        "much-cpu",
        {"resources": {"requests": {"cpu": "1000"}}},
        "Unschedulable",
        "Insufficient cpu",
        ("Event", "Insufficient cpu"),
    ),
    Broken(
        "many-gpus",
        {"resources": {"limits": {"nvidia.com/gpu": 64}}, "engine": {"device": "cpu"}},
        "Unschedulable",
        "Insufficient nvidia.com/gpu",
        ("Event", "Insufficient nvidia.com/gpu"),
    ),
    Broken(
        "no-flag",
        {"engine": {"extraArgs": ["--no-such-flag"]}},
        "CrashLoop",
        "--no-such-flag",
        ("Pod", "no-such-flag"),
    ),
    Broken(
        "no-room", {"engine": {"maxModelLen": 2048, "kvCacheMemory": "1Mi"}}, "TooLarge", "needs", ("Pod", "not fit")
    ),
    Broken(
        "no-memory",
        {"engine": {"maxModelLen": 512, "kvCacheMemory": "16Mi"}, "resources": TINY | {"limits": {"memory": "100Mi"}}},
        "OOMKilled",
        "more memory than its limit",
        ("Pod", "OOMKilled"),
    ),
    Broken("no-sum", {"engine": {"kvCacheMemory": "2Gi"}}, "TooLarge", "is 1,024 MiB"),
    Broken(
        "no-runtime", {"runtimeClassName": "nothing"}, "PodRefused", '"nothing" not found', ("Deployment", "nothing")
    ),
    Broken(
        "no-keys",
        {"router": {"resources": TINY}, "auth": {"apiKeysSecretRef": {"name": "no-keys"}}},
        "RouterFailed",
        '"no-keys" not found',
        ("Event", '"no-keys" not found'),
        of="RouterReady",
    ),
    Broken("same-host", {"router": {}} | exposed(HOST), "HostTaken", f"/{FINE}"),
    Broken("no-router", {"router": {"ref": {"name": "missing"}}}, "RouterNotFound", "'missing'"),
    Broken("taken", {}, "NameTaken", "ServiceAccount taken-engine"),
    Broken(
        "over-quota", {"router": {}}, "QuotaExceeded", "exceeded quota", ("Deployment", "exceeded quota"), where="full"
    ),
    Broken(
        "on-the-node",
        {"router": {}, "model": HUB | {"cache": {"mode": "HostPath", "hostPath": "/tmp/models"}}},
        "PodRefused",
        "violates PodSecurity",
        ("Deployment", "violates PodSecurity"),
        where="strict",
    ),
)


@pytest.fixture(scope="module")
def places(cluster: Cluster, namespace: str, make_namespace: Callable[[], str]) -> dict[str, str]:
    found = {"open": namespace, "full": make_namespace(), "strict": make_namespace()}
    secret: Raw = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "to-nowhere"}}
    cluster.apply(secret | {"stringData": {"HF_ENDPOINT": NOWHERE, "AWS_ENDPOINT_URL": NOWHERE}}, found["open"])
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "taken-engine"}}, found["open"])
    quota: Raw = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
    cluster.apply(quota | {"spec": {"hard": {"pods": "0"}}}, found["full"])
    cluster.kubectl("label", "namespace", found["strict"], "pod-security.kubernetes.io/enforce=restricted")
    return found


@pytest.fixture(scope="module")
def fine(cluster: Cluster, places: dict[str, str]) -> Raw:
    """A working service, whose router and host the broken services claim."""
    cluster.serve(places["open"], FINE, **exposed(HOST))
    return cluster.until_ready(places["open"], FINE)


@pytest.fixture(scope="module")
def reported(cluster: Cluster, places: dict[str, str], fine: Raw, step: Step) -> dict[str, Broken]:
    """All broken services, created at once, with the times of their faults, conditions and events."""
    for broken in BROKEN:
        cluster.serve(places[broken.where], broken.name, **(BESIDE_FINE | broken.spec))
    waiting, deadline = list(BROKEN), time.monotonic() + LIMIT_S
    with step("all broken services have condition and event"):
        while waiting and time.monotonic() < deadline:
            for place in places.values():
                _record(cluster, place, [broken for broken in waiting if places[broken.where] == place])
            waiting = [
                broken for broken in waiting if not (broken.signal_times and broken.event_times and broken.messages)
            ]
            Event().wait(POLL_S)
    return {broken.name: broken for broken in BROKEN}


def _record(cluster: Cluster, namespace: str, waiting: list[Broken]) -> None:
    found = {kind: cluster.find(kind, namespace) for kind in ("Pod", "Deployment", "Event", "InferenceService")}
    for broken in waiting:
        service = next(o for o in found["InferenceService"] if o["metadata"]["name"] == broken.name)
        if broken.signal is None:
            broken.signal_times.add(_time(service["metadata"]["creationTimestamp"]))
        else:
            kind, says = broken.signal
            of_its = [o for o in found[kind] if _is_of(broken, o)]
            broken.signal_times.update(stamp for o in of_its for text, stamp in _texts(o) if re.search(says, text))
        if condition(service, broken.of).get("reason") == broken.reason:
            broken.messages.append(condition(service, broken.of)["message"])
        broken.event_times.update(_time(event["eventTime"]) for event in found["Event"] if _is_event_of(event, broken))


def _is_of(broken: Broken, raw: Raw) -> bool:
    name: str = raw.get("involvedObject", raw["metadata"])["name"]
    return name.startswith(f"{broken.name}-")


def _texts(raw: Raw) -> Iterator[tuple[str, datetime]]:
    """Texts of an object by which Kubernetes reports a fault, with their times."""
    if "involvedObject" in raw:
        yield raw.get("message", ""), _time(raw["metadata"]["creationTimestamp"])
    status = raw.get("status", {})
    for row in status.get("conditions", []):
        if row["type"] == "ReplicaFailure":
            yield row["message"], _time(row["lastTransitionTime"])
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        for state in ("state", "lastState"):
            ended = container.get(state, {}).get("terminated")
            if ended is not None:
                text = f"exit code {ended['exitCode']} {ended.get('reason', '')} {ended.get('message', '')}"
                yield text, _time(ended["finishedAt"])


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _is_event_of(event: Raw, broken: Broken) -> bool:
    about = event["involvedObject"]
    is_its = (about["kind"], about["name"]) == ("InferenceService", broken.name)
    return is_its and event["reason"] == broken.reason and event["type"] == "Warning"


@pytest.mark.parametrize("name", [broken.name for broken in BROKEN])
def test_a_broken_service_has_its_reason_within_10_s(
    name: str, reported: dict[str, Broken], cluster: Cluster, places: dict[str, str]
) -> None:
    broken = reported[name]
    service: Any = cluster.get("InferenceService", places[broken.where], name)
    assert broken.signal_times, (broken, service["status"])
    assert broken.messages, (broken, service["status"])
    assert broken.event_times, (broken, service["status"])
    assert broken.says in broken.messages[0]
    took_s = (min(broken.event_times) - min(broken.signal_times)).total_seconds()
    print(f"{name}: {took_s:.1f} s after the signal")
    assert took_s <= WITHIN_S


def test_a_working_service_is_not_disturbed(
    reported: dict[str, Broken], fine: Raw, cluster: Cluster, places: dict[str, str]
) -> None:
    now: Any = cluster.get("InferenceService", places["open"], FINE)
    assert condition(now, "Ready")["lastTransitionTime"] == condition(fine, "Ready")["lastTransitionTime"]
    pods = cluster.find("Pod", places["open"], f"serving.octavo.dev/service={FINE}")
    assert [c["restartCount"] for pod in pods for c in pod["status"]["containerStatuses"]] == [0, 0]
    assert "Paris" in cluster.ask(HOST, FINE)


def test_foreign_objects_are_left_alone(reported: dict[str, Broken], cluster: Cluster, places: dict[str, str]) -> None:
    theirs: Any = cluster.get("ServiceAccount", places["open"], "taken-engine")
    assert "ownerReferences" not in theirs["metadata"]
    assert "labels" not in theirs["metadata"]


def test_each_event_is_recorded_once(reported: dict[str, Broken], cluster: Cluster, places: dict[str, str]) -> None:
    """Repeated failures of pods must not repeat the event."""
    events = cluster.find("Event", places["open"])
    counts = [
        (event.get("series") or {}).get("count", 1)
        for broken in BROKEN
        for event in events
        if _is_event_of(event, broken)
    ]
    assert counts
    assert max(counts) == 1
