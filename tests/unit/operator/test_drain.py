"""Pods that shall be removed are drained first: which, when their Deployment may be scaled, and what ends the wait."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.names import DEPLOYMENT, GROUP_SET
from octavo_operator.observed import EngineDeployment, Observed, Pod, RouterReport
from octavo_operator.plan.drain import drain

NOW, JUST_NOW, LONG_AGO = "2026-01-01T01:00:00Z", "2026-01-01T00:59:59Z", "2026-01-01T00:50:00Z"
TIMEOUT_S = 600


def _pod(name: str, **fields: Any) -> Pod:
    return Pod(name=name, uid=name, revision="r", has_node=True, **fields)


def _serving(name: str) -> Pod:
    return _pod(name, is_ready=True, is_pod_ready=True, is_admitted=True, admitted_epoch="e")


def _draining(name: str, since: str = JUST_NOW, **fields: Any) -> Pod:
    return _pod(name, **({"is_ready": True, "draining_since": since} | fields))


def _report(sends_to: str = "", **in_flight: int) -> RouterReport:
    return RouterReport(pod="router", sends_to=frozenset(sends_to.split()), in_flight=in_flight)


def _observed(*pods: Pod, replicas: int = 2, kind: str = DEPLOYMENT, **fields: Any) -> Observed:
    deployment = EngineDeployment(name="d", uid="d", kind=kind, revision="r", replicas=replicas, created="1")
    return Observed(engine_deployments=(deployment,), pods=pods, **fields)


def _of_set(*pods: Pod, replicas: int = 3, **fields: Any) -> Observed:
    """The pods of a LeaderWorkerSet in the order of their ordinals."""
    numbered = (replace(pod, ordinal=ordinal) for ordinal, pod in enumerate(pods))
    return _observed(*numbered, replicas=replicas, kind=GROUP_SET, **fields)


def _drain(observed: Observed, target: int = 1) -> tuple[set[str], int]:
    found = drain(observed, {"d": target}, timeout_s=TIMEOUT_S, now=NOW)
    return set(found.leaving), found.replicas["d"]


@pytest.mark.parametrize(
    ("routers", "replicas"),
    [
        pytest.param({"a": _report(), "b": _report()}, 1, id="no router sends it requests, and none runs"),
        pytest.param({"a": _report("y"), "b": _report()}, 2, id="a router may send it requests"),
        pytest.param({"a": _report(y=1), "b": _report()}, 2, id="a request runs"),
        pytest.param({"a": _report(), "b": None}, 2, id="a router has not reported"),
        pytest.param({}, 1, id="no router"),
    ],
)
def test_a_deployment_is_scaled_once_its_drained_pod_has_no_requests(
    routers: Mapping[str, RouterReport | None], replicas: int
) -> None:
    assert _drain(_observed(_serving("x"), _draining("y"), routers=routers)) == ({"y"}, replicas)


def test_a_request_through_a_router_that_ends_counts() -> None:
    pods, routers = (_serving("x"), _draining("y")), {"a": _report()}
    assert _drain(_observed(*pods, routers=routers, leaving_routers={"old": _report(y=1)})) == ({"y"}, 2)
    assert _drain(_observed(*pods, routers=routers, leaving_routers={"old": None})) == ({"y"}, 1)


def test_the_pods_of_a_deployment_that_a_user_deletes_are_left_alone() -> None:
    deployment = EngineDeployment(name="d", uid="d", revision="r", replicas=1, created="1", is_deleting=True)
    found = drain(Observed(engine_deployments=(deployment,), pods=(_serving("x"),)), {}, timeout_s=TIMEOUT_S, now=NOW)
    assert (found.leaving, found.busy) == (set(), set())


def test_nothing_waits_for_ever() -> None:
    busy = {"a": _report("y", y=1), "b": None}
    late = _observed(_serving("x"), _draining("y", LONG_AGO), routers=busy)
    lost = _observed(_serving("x"), _draining("y", is_ready=False), routers=busy)
    assert _drain(late) == _drain(lost) == ({"y"}, 1)


@pytest.mark.parametrize(
    ("pods", "leaving"),
    [
        pytest.param((_serving("x"), _serving("y")), {"y"}, id="the least worth"),
        pytest.param((_serving("x"), _draining("z"), _serving("y")), {"z"}, id="one that drains already"),
        pytest.param((_draining("x"), _pod("z")), {"z"}, id="one that starts"),
        pytest.param((_serving("x"), _pod("z", has_ended=True), _serving("y")), {"y"}, id="an ended one is none"),
        pytest.param((_serving("x"), _pod("z", is_terminating=True), _serving("y")), {"y"}, id="nor a terminating one"),
    ],
)
def test_the_pod_to_remove(pods: tuple[Pod, ...], leaving: set[str]) -> None:
    worth = (RouterReport(pod="a", worth_tokens={"x": 5, "y": 7}), RouterReport(pod="b", worth_tokens={"x": 6}))
    seen = _observed(*pods, replicas=3, routers={report.pod: report for report in worth})
    assert _drain(seen, target=len([p for p in pods if not p.has_ended and not p.is_terminating]) - 1)[0] == leaving


def test_no_second_pod_becomes_unready_while_the_deployment_removes_one() -> None:
    """It may remove any unready pod."""
    removing = _observed(_draining("x"), _serving("y"), _serving("z"), routers={"a": _report("y z")})
    assert _drain(removing) == ({"x"}, 2)
    removed = _observed(_serving("y"), _serving("z"), routers={"a": _report("y z")})
    assert _drain(removed) == ({"y"}, 2)


def test_a_pod_with_requests_is_not_risked_when_it_is_needed_again() -> None:
    reopened = _pod("x", is_ready=True, is_admitted=True, admitted_epoch="e")  # the kubelet has not seen it yet
    seen = _observed(reopened, _pod("starts"), _serving("y"), replicas=3, routers={"a": _report("y", x=1)})
    assert _drain(seen, target=2) == ({"starts"}, 3)


@pytest.mark.parametrize(
    ("pods", "sends_to", "found"),
    [
        pytest.param((_serving("x"), _serving("y"), _serving("z")), "x y z", ({"y", "z"}, 3), id="all serve"),
        pytest.param((_serving("x"), _draining("y"), _draining("z")), "x", ({"y", "z"}, 1), id="all have drained"),
        pytest.param((_serving("x"), _draining("y"), _serving("z")), "x z", ({"y", "z"}, 3), id="one has drained"),
        pytest.param((_pod("x"), _draining("y"), _draining("z")), "", ({"y", "z"}, 1), id="another one starts"),
        pytest.param((_serving("x"), _pod("y"), _pod("z")), "x", ({"y", "z"}, 1), id="those that go start"),
    ],
)
def test_a_set_removes_the_highest_ordinals(pods: tuple[Pod, ...], sends_to: str, found: tuple[set[str], int]) -> None:
    """Unlike the pods of a Deployment, an unready pod with a low ordinal stays, and need not be drained."""
    assert _drain(_of_set(*pods, routers={"a": _report(sends_to)})) == found


def test_pods_that_a_set_is_about_to_remove_get_no_requests() -> None:
    removing = _of_set(_serving("x"), _serving("y"), _serving("z"), replicas=1, routers={"a": _report("x y z")})
    assert _drain(removing) == ({"y", "z"}, 1)
