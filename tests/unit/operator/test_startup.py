"""The phases of a replica's start, from the pod's status, into the status of its service."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from octavo_operator.cluster.pods import pod_of
from octavo_operator.desired.engine import engine_revision
from octavo_operator.names import ADMITTED_GATE, REVISION_LABEL
from octavo_operator.observed import Observed, Pod, RouterReport, Startup
from octavo_operator.plan.plan import plan
from octavo_operator.service import Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
SERVICE = read_service(stored(Case("", {}, name="llm")))
NO_ROUTERS: Mapping[str, RouterReport | None] = MappingProxyType({})
TIMES = {"PodScheduled": 1, "Initialized": 4, "ContainersReady": 50, ADMITTED_GATE: 52, "Ready": 53}


def _at(second: int) -> str:
    return f"2026-11-23T10:00:{second:02d}Z"


def _pod(
    *, restarts: int = 0, ready: str = "True", created: int = 0, without: str = "", name: str = "e"
) -> dict[str, Any]:
    rows = [
        {"type": type_, "status": "True", "lastTransitionTime": _at(second)}
        for type_, second in TIMES.items()
        if type_ != without
    ]
    rows[-1] |= {"status": ready}
    engine = {"name": "engine", "restartCount": restarts, "state": {"running": {"startedAt": _at(9)}}}
    labels = {REVISION_LABEL: engine_revision(SERVICE, SETTINGS)}
    metadata = {"name": name, "uid": name, "labels": labels, "creationTimestamp": _at(created)}
    return {"metadata": metadata, "status": {"conditions": rows, "containerStatuses": [engine]}}


def _status(*pods: Pod, routers: Mapping[str, RouterReport | None] = NO_ROUTERS, **status: Any) -> dict[str, Any]:
    made = plan(
        SERVICE, Observed(pods=pods, routers=routers, status=status), SETTINGS, now=_at(59), new_secrets=SECRETS
    )
    found: dict[str, Any] = made.status.get("startup", {})
    return found


def test_the_phases_of_a_start_are_in_the_status() -> None:
    pod = pod_of(_pod())
    assert pod.startup == Startup(_at(0), (1, 3, 5, 41, 3))
    assert _status(pod) == {
        "pod": "e",
        "totalSeconds": 53,
        "scheduleSeconds": 1,
        "fetchSeconds": 3,
        "pullSeconds": 5,
        "loadSeconds": 41,
        "admitSeconds": 3,
    }


def test_the_status_has_the_phases_that_the_engine_reports_through_a_router() -> None:
    reports = {
        "old": None,
        "blind": RouterReport(pod="blind"),
        "new": RouterReport(pod="new", startups={"e": {"import": 2.6, "weights": 30.2}}),
    }
    found = _status(pod_of(_pod()), routers=reports)
    assert (found["loadSeconds"], found["importSeconds"], found["weightsSeconds"]) == (41, 3, 30)
    assert "compileSeconds" not in found


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(_pod(restarts=1), id="a restarted container"),
        pytest.param(_pod(ready="False"), id="a pod that is not ready"),
        pytest.param(_pod(without="Initialized"), id="a status without a time"),
    ],
)
def test_a_start_whose_times_are_not_known_is_not_reported(raw: dict[str, Any]) -> None:
    assert pod_of(raw).startup is None
    assert _status(pod_of(raw), startup={"pod": "before"}) == {"pod": "before"}


def test_the_newest_replica_counts_and_keeps_its_first_times() -> None:
    old, new = pod_of(_pod(name="z")), pod_of(_pod(name="a", created=1))
    assert _status(old, new)["pod"] == "a"
    assert _status(old, new, startup={"pod": "a", "totalSeconds": 7}) == {"pod": "a", "totalSeconds": 7}
