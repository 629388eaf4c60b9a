"""A worker of a replica of several pods that has a trouble: conditions and the rollout treat it as an engine's."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_operator.cluster.view import View
from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.names import COMPONENT_LABEL, ENGINE, ENGINE_WORKER, GROUP_SET, REVISION_LABEL, SERVICE_LABEL
from octavo_operator.observed import EngineDeployment, Observed, Pod, RouterReport, Trouble
from octavo_operator.plan.conditions import Condition
from octavo_operator.plan.plan import plan
from octavo_operator.plan.readiness_gates import gate_actions
from octavo_operator.plan.rollout import STEADY, pace_of, rollout
from octavo_operator.plan.status_conditions import conditions_of
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(
    engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system", has_group_sets=True
)
NODES = 3
NOW, JUST_NOW, LONG_AGO = "2026-01-01T02:00:00Z", "2026-01-01T01:59:30Z", "2026-01-01T00:00:00Z"


def _service(replicas: int = 2, **spec: Any) -> InferenceService:
    division = {"parallelism": {"tensor": NODES, "nodes": NODES}, "replicas": replicas}
    return read_service(stored(Case("", division | spec, name="llm")))


WANTED = engine_revision(_service(), SETTINGS)
LEADER, WORKER = f"llm-{WANTED}-1", f"llm-{WANTED}-1-2"


def _engine(**fields: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": ENGINE, "restartCount": 1, "state": {}} | fields]}


def _ended(**terminated: Any) -> dict[str, Any]:
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    return _engine(state=back_off, lastState={"terminated": {"exitCode": 1} | terminated})


def _coded(code: str) -> dict[str, Any]:
    return _ended(message=f'{{"code": "{code}", "message": "the value and the limit"}}')


FETCH = {"name": "fetch", "restartCount": 0, "state": {"terminated": {"exitCode": 1, "message": "404"}}}
NO_ROOM = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]}
LOST = {"conditions": [{"type": type_, "status": s} for type_, s in (("ContainersReady", "True"), ("Ready", "False"))]}
STATUSES: dict[str, dict[str, Any]] = {
    "Unschedulable": NO_ROOM,
    "NodeLost": LOST,
    "CrashLoop": _coded("StartupFailed"),
    "killed": _ended(message="", exitCode=137),
    "OOMKilled": _ended(reason="OOMKilled"),
    "TooLarge": _coded("OutOfMemory"),
    "NoGpuSupport": _coded("NoDevice"),
    "NotFound": _coded("ModelNotFound"),
    "FetchFailed": {"initContainerStatuses": [FETCH]},
    "Fetching": {"initContainerStatuses": [FETCH | {"state": {"running": {}}}]},
    **{
        reason: _engine(state={"waiting": {"reason": reason, "message": "the kubelet's reason"}})
        for reason in ("ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "RunContainerError")
    },
    "starts": _engine(state={"running": {}}, restartCount=0),
}


def _view(**statuses: dict[str, Any]) -> View:
    """The view of two replicas of three pods. `statuses`: by the end of a pod's name; `ends` marks a deleted pod."""
    view = View()
    made = desired_engine(_service(), SETTINGS, replicas=2)
    made["metadata"] |= {"uid": "u", "creationTimestamp": "1"}
    view.update(made)
    for group in range(2):
        for index in range(NODES):
            end = f"-{group}" + (f"-{index}" if index else "")
            labels = {SERVICE_LABEL: "llm", REVISION_LABEL: WANTED, COMPONENT_LABEL: ENGINE_WORKER if index else ENGINE}
            labels["leaderworkerset.sigs.k8s.io/group-index"] = str(group)
            name = f"llm-{WANTED}{end}"
            status = dict(statuses.get(end.replace("-", "_"), {}))
            metadata = {"name": name, "namespace": "default", "uid": name, "labels": labels}
            metadata |= {"deletionTimestamp": NOW} if status.pop("ends", False) else {}
            view.update({"kind": "Pod", "metadata": metadata, "status": status})
    return view


def _conditions(view: View) -> dict[str, Condition]:
    seen = view.observed(_service(), {})
    return {each.type: each for each in conditions_of(_service(), seen, SETTINGS, wanted=WANTED)}


@pytest.mark.parametrize("status", STATUSES.values(), ids=STATUSES)
def test_a_trouble_of_a_worker_is_named_as_one_of_an_engine(status: dict[str, Any]) -> None:
    of_engine, of_worker = _conditions(_view(_1=status)), _conditions(_view(_1_2=status))
    named = {kind: replace(each, message=each.message.replace(LEADER, WORKER)) for kind, each in of_engine.items()}
    assert of_worker == named


def test_the_reason_of_each_trouble_of_a_worker_is_given() -> None:
    found = {name: _conditions(_view(_1_2=status)) for name, status in STATUSES.items()}
    reasons = {name: each["WorkloadReady"].reason for name, each in found.items()}
    assert set(reasons.values()) >= {"Unschedulable", "NodeLost", "CrashLoop", "OOMKilled", "ImagePullError"}
    assert found["CrashLoop"]["WorkloadReady"].message == (
        f"1 of 2 engines are not ready for this reason: {WORKER}: exit code 1: the value and the limit"
    )
    for reason, type_ in (("TooLarge", "FitsHardware"), ("NoGpuSupport", "FitsHardware"), ("NotFound", "ModelReady")):
        assert found[reason][type_].reason == reason


def test_the_worst_trouble_of_all_pods_comes_first_and_replicas_are_counted() -> None:
    seen = _conditions(_view(_0_1=STATUSES["OOMKilled"], _0_2=STATUSES["OOMKilled"], _1=NO_ROOM))["WorkloadReady"]
    assert (seen.reason, seen.message.partition(" engines")[0]) == ("OOMKilled", "1 of 2")
    both = _conditions(_view(_0_1=NO_ROOM, _0_2=NO_ROOM, _1=NO_ROOM))["WorkloadReady"]
    assert (both.reason, both.message.partition(" engines")[0]) == ("Unschedulable", "2 of 2")


@pytest.mark.parametrize("status", [NO_ROOM, LOST, STATUSES["RunContainerError"]], ids=["no room", "lost", "no start"])
def test_the_crash_of_a_leader_does_not_hide_the_worker_that_it_lost(status: dict[str, Any]) -> None:
    """A leader ends when a worker has: its own message only says that the worker is gone."""
    found = _conditions(_view(_1=STATUSES["CrashLoop"], _1_2=status))["WorkloadReady"]
    assert WORKER in found.message
    other = _conditions(_view(_0=STATUSES["CrashLoop"], _1_2=status))["WorkloadReady"]
    assert (other.reason, f"llm-{WANTED}-0" in other.message) == ("CrashLoop", True)


@pytest.mark.parametrize("end", ["_1", "_1_2"], ids=["leader", "worker"])
def test_a_pod_that_a_lost_node_keeps_is_named(end: str) -> None:
    """Kubernetes deletes it after some minutes, but replaces it only when its node is back or deleted."""
    lost, ends, started = ({**s, "ends": e} for s, e in ((LOST, True), (STATUSES["starts"], True), (LOST, False)))
    name = LEADER if end == "_1" else WORKER
    for status, reason in ((lost, "NodeLost"), (started, "NodeLost"), (ends, "Starting")):
        found = _conditions(_view(**{end: status}))["WorkloadReady"]
        assert (found.reason, name in found.message) == (reason, reason == "NodeLost")


def test_a_failure_of_a_worker_stays_while_it_restarts_without_a_reason() -> None:
    view = _view(_1_2=STATUSES["CrashLoop"])
    status = plan(_service(), view.observed(_service(), {}), SETTINGS, now="t", new_secrets=SECRETS).status
    again = replace(_view(_1_2=_engine(restartCount=2)).observed(_service(), {}), status=status)
    found = {each.type: each for each in conditions_of(_service(), again, SETTINGS, wanted=WANTED)}
    assert found["WorkloadReady"].reason == "CrashLoop"


def _pod(name: str = "new", **fields: Any) -> Pod:
    return Pod(**({"name": name, "uid": name, "revision": WANTED, "message": "0/3 nodes are available"} | fields))


PLACED: dict[str, Any] = {"has_node": True, "stuck_since": LONG_AGO}
SERVING: dict[str, Any] = {"is_ready": True, "is_pod_ready": True, "is_admitted": True, "has_node": True}


def _rolling(*workers: Pod) -> Observed:
    """Two old replicas serve; the leader of a new one has had its node for long."""
    made = (
        EngineDeployment(name=f"llm-{r}", uid=r, kind=GROUP_SET, revision=r, replicas=n, created="1")
        for r, n in (("old", 2), (WANTED, 1))
    )
    old = (_pod(f"old-{i}", revision="old", ordinal=i, **SERVING) for i in range(2))
    return Observed(engine_deployments=tuple(made), pods=(*old, _pod(**PLACED, workers=workers)))


def _waiting(since: str) -> Pod:
    return _pod("new-2", trouble="Unschedulable", waits_since=since)


@pytest.mark.parametrize(
    ("workers", "in_place", "reason"),
    [
        pytest.param((_pod("new-1", **PLACED), _waiting(LONG_AGO)), True, "RollingOut", id="no room for a worker"),
        pytest.param((_pod("new-1", **PLACED), _waiting(JUST_NOW)), False, "RollingOut", id="patience"),
        pytest.param((_pod("new-1", **PLACED),), False, "RollingOut", id="a worker is missing"),
        pytest.param(
            (_pod("new-1", **PLACED), _pod("new-2", **PLACED | {"stuck_since": JUST_NOW})),
            *(False, "RollingOut"),
            id="the last worker just got its node",
        ),
        pytest.param(
            (_pod("new-1", **PLACED), _pod("new-2", **PLACED, trouble="CrashLoop")),
            *(False, "DeadlineExceeded"),
            id="all have their nodes",
        ),
    ],
)
def test_a_replica_has_its_node_when_all_of_its_pods_do(workers: tuple[Pod, ...], in_place: bool, reason: str) -> None:
    found = pace_of(_service(), _rolling(*workers), WANTED, now=NOW)
    assert (found.in_place, found.reason) == (in_place, reason)
    assert ("new-2" in found.why) == (reason == "DeadlineExceeded")


flags = st.booleans()
workers = st.builds(
    Pod,
    name=st.just("worker"),
    uid=st.just("worker"),
    revision=st.just(WANTED),
    is_ready=flags,
    is_pod_ready=flags,
    is_admitted=flags,
    has_node=flags,
    is_terminating=flags,
    has_ended=flags,
    trouble=st.sampled_from([None, *get_args(Trouble)]),
    draining_since=st.sampled_from([None, LONG_AGO]),
)


@given(found=st.lists(st.lists(workers, max_size=3), min_size=3, max_size=3), replicas=st.integers(0, 4))
def test_workers_are_no_replicas_and_get_no_requests(found: list[list[Pod]], replicas: int) -> None:
    """Only leaders are counted, admitted and drained; no trouble of a worker changes that."""
    service, report = _service(replicas), RouterReport(pod="r", admitted={f"llm-{i}": "e1" for i in range(3)})
    engines = tuple(_pod(f"llm-{i}", ordinal=i, is_ready=True, has_node=True, is_admitted=i > 0) for i in range(3))
    made = EngineDeployment(name=f"llm-{WANTED}", uid="u", kind=GROUP_SET, revision=WANTED, replicas=3, created="1")
    alone = Observed(engine_deployments=(made,), pods=engines, routers={"r": report})
    whole = replace(alone, pods=tuple(replace(e, workers=tuple(w)) for e, w in zip(engines, found, strict=True)))
    steps = [rollout(service, seen, SETTINGS, STEADY, now=NOW) for seen in (alone, whole)]
    assert steps[0] == steps[1]
    gates = [list(gate_actions(seen, {"llm-1"})) for seen in (alone, whole)]
    assert gates[0] == gates[1] != []
    status = [plan(service, seen, SETTINGS, now=NOW, new_secrets=SECRETS).status for seen in (alone, whole)]
    for field in ("replicas", "revision", "model"):
        assert status[0].get(field) == status[1].get(field)
