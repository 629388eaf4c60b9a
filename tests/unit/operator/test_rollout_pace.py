"""The pace of a rollout: with a surge or in place, paused, or stopped at its deadline."""

from typing import Any

import pytest
from octavo_operator.cluster.pods import pod_of
from octavo_operator.cluster.trim import trimmed
from octavo_operator.names import REVISION_LABEL
from octavo_operator.observed import EngineDeployment, Observed, Pod, RouterReport
from octavo_operator.plan.actions import Delete, SetReplicas
from octavo_operator.plan.plan import PACE_EVERY_S, Plan, plan
from octavo_operator.plan.rollout import Pace, pace_of
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS

NOW, JUST_NOW, LONG_AGO = "2026-01-01T02:00:00Z", "2026-01-01T01:59:30Z", "2026-01-01T00:00:00Z"
SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")

ROUTERS = {"router": RouterReport(pod="router")}


def _service(replicas: int = 2, **rollout: Any) -> InferenceService:
    return read_service(stored(Case("", {"replicas": replicas, "rollout": rollout}, name="llm")))


WANTED = plan(_service(), Observed(), SETTINGS, now=NOW, new_secrets=SECRETS).status["revision"]["updated"]


def _pod(**fields: Any) -> Pod:
    return Pod(**({"name": "new", "uid": "new", "revision": WANTED, "message": "0/3 nodes are available"} | fields))


def _old(number: int = 2) -> tuple[Pod, ...]:
    serves = {"is_ready": True, "is_pod_ready": True, "is_admitted": True, "has_node": True}
    return tuple(_pod(name=f"old-{i}", uid=f"old-{i}", revision="old", **serves) for i in range(number))


def _observed(*pods: Pod, **status: Any) -> Observed:
    made = (
        EngineDeployment(name=name, uid=name, revision=revision, replicas=replicas, created="1")
        for name, revision, replicas in (("llm-engine-old", "old", 2), (f"llm-engine-{WANTED}", WANTED, 1))
    )
    return Observed(engine_deployments=tuple(made), pods=pods, routers=ROUTERS, status=status)


def _plan(service: InferenceService, observed: Observed) -> Plan:
    return plan(service, observed, SETTINGS, now=NOW, new_secrets=SECRETS)


def _reason(made: Plan, type_: str) -> str:
    return str(next(row["reason"] for row in made.status["conditions"] if row["type"] == type_))


@pytest.mark.parametrize(
    ("service", "since", "in_place", "reason"),
    [
        pytest.param(_service(), JUST_NOW, False, "RollingOut", id="patient"),
        pytest.param(_service(), LONG_AGO, True, "RollingOut", id="impatient"),
        pytest.param(_service(surgePatienceSeconds=30), JUST_NOW, True, "RollingOut", id="shorter patience"),
        pytest.param(_service(1), LONG_AGO, False, "NoRoomToSurge", id="one replica"),
        pytest.param(_service(strategy="Surge"), LONG_AGO, False, "NoRoomToSurge", id="surge only"),
        pytest.param(_service(strategy="InPlace"), JUST_NOW, True, "RollingOut", id="in place"),
        pytest.param(_service(1, strategy="InPlace"), JUST_NOW, True, "RollingOut", id="one in place"),
        pytest.param(_service(paused=True), LONG_AGO, False, "Paused", id="paused"),
    ],
)
def test_a_new_replica_without_a_node(service: InferenceService, since: str, in_place: bool, reason: str) -> None:
    seen = _observed(*_old(), _pod(trouble="Unschedulable", waits_since=since))
    found = pace_of(service, seen, WANTED, now=NOW)
    assert (found.in_place, found.reason) == (in_place, reason)
    made = _plan(service, seen)
    assert (_reason(made, "Progressing"), made.status.get("rollout")) == (
        reason,
        {"inPlace": True} if in_place else None,
    )
    assert made.again_s is not None


def test_a_volume_that_an_old_replica_holds_is_lack_of_room() -> None:
    seen = _observed(*_old(), _pod(has_node=True, trouble="MountFailed", stuck_since=LONG_AGO))
    assert pace_of(_service(), seen, WANTED, now=NOW).in_place is False  # the deadline is over, too
    assert pace_of(_service(progressDeadlineSeconds=9999), seen, WANTED, now=NOW).in_place


def test_a_rollout_in_place_stays_so() -> None:
    """A further surge would wait for the whole patience again."""
    before = {"revision": {"updated": WANTED}, "rollout": {"inPlace": True}}
    assert pace_of(_service(), _observed(*_old(1), **before), WANTED, now=NOW).in_place
    assert not pace_of(
        _service(), _observed(*_old(), **before | {"revision": {"updated": "x"}}), WANTED, now=NOW
    ).in_place


def test_a_replica_that_does_not_serve_stops_the_rollout_until_another_revision_is_wanted() -> None:
    service = _service(progressDeadlineSeconds=60)
    stuck = _pod(has_node=True, stuck_since=LONG_AGO, trouble="CrashLoop", message="exit code 2")
    made = _plan(service, _observed(*_old(1), stuck))
    assert _reason(made, "Progressing") == "DeadlineExceeded"
    assert [action.name for action in made.actions if isinstance(action, Delete)] == [f"llm-engine-{WANTED}"]
    later = _after_stop(**made.status)
    conditions = {row["type"]: row for row in _plan(service, later).status["conditions"]}
    assert (conditions["Progressing"]["reason"], conditions["Ready"]["reason"]) == ("DeadlineExceeded", "Serving")
    assert "exit code 2" in conditions["Progressing"]["message"]
    assert conditions["WorkloadReady"]["reason"] == "PodsReady"
    assert not [action for action in _plan(service, later).actions if WANTED in str(action)]
    corrected = read_service(stored(Case("", {"replicas": 2, "engine": {"maxModelLen": 64}}, name="llm"), generation=2))
    assert _reason(_plan(corrected, later), "Progressing") == "RollingOut"


def test_a_stopped_rollout_scales_the_old_revision() -> None:
    stopped = [{"type": "Progressing", "status": "False", "reason": "DeadlineExceeded", "message": "stuck"}]
    made = _plan(_service(4), _after_stop(revision={"updated": WANTED, "current": "old"}, conditions=stopped))
    assert [(a.name, a.replicas) for a in made.actions if isinstance(a, SetReplicas)] == [("llm-engine-old", 4)]


def _after_stop(**status: Any) -> Observed:
    """The old revision alone."""
    (old, _) = _observed().engine_deployments
    return Observed(engine_deployments=(old,), pods=_old(), routers=ROUTERS, status=status)


@pytest.mark.parametrize(
    ("num_old", "rollout", "reason"),
    [
        pytest.param(2, {}, "Serving", id="all serve"),
        pytest.param(1, {}, "CrashLoop", id="one is missing"),
        pytest.param(1, {"strategy": "InPlace"}, "Serving", id="one is replaced in place"),
        pytest.param(0, {"strategy": "InPlace"}, "CrashLoop", id="none serves"),
    ],
)
def test_a_rollout_that_keeps_its_replicas_keeps_ready(num_old: int, rollout: dict[str, Any], reason: str) -> None:
    fails = _pod(has_node=True, stuck_since=JUST_NOW, trouble="CrashLoop", message="exit code 2")
    made = _plan(_service(**rollout), _observed(*_old(num_old), fails))
    assert _reason(made, "Ready") == reason
    assert _reason(made, "WorkloadReady") == "CrashLoop"


@pytest.mark.parametrize("fields", [{"has_node": True, "stuck_since": JUST_NOW}, {"waits_since": LONG_AGO}])
def test_neither_a_start_nor_a_wait_for_room_runs_into_the_deadline(fields: dict[str, Any]) -> None:
    service = _service(strategy="Surge", progressDeadlineSeconds=60)
    assert pace_of(service, _observed(*_old(), _pod(**fields)), WANTED, now=NOW).reason != "DeadlineExceeded"


def test_the_first_revision_has_no_deadline() -> None:
    """A stopped rollout returns to an older revision, which a first one lacks: other conditions report its trouble."""
    stuck = _pod(has_node=True, stuck_since=LONG_AGO)
    (_, new) = _observed().engine_deployments
    assert pace_of(_service(), Observed(engine_deployments=(new,), pods=(stuck,)), WANTED, now=NOW) == Pace()


def test_the_plan_looks_again_while_a_rollout_goes_on() -> None:
    assert _plan(_service(), _observed(*_old())).again_s == PACE_EVERY_S
    assert _plan(_service(), Observed()).again_s is None


def _raw(*conditions: tuple[str, str, str]) -> dict[str, Any]:
    rows = [dict(zip(("type", "status", "lastTransitionTime"), row, strict=True)) for row in conditions]
    metadata = {"name": "p", "uid": "u", "labels": {REVISION_LABEL: "r"}}
    return {"metadata": metadata, "status": {"conditions": rows}}


@pytest.mark.parametrize(
    ("raw", "has_node", "waits", "stuck"),
    [
        pytest.param(_raw(("PodScheduled", "False", "1"), ("Ready", "False", "2")), False, "1", None, id="no node"),
        pytest.param(_raw(("PodScheduled", "True", "3"), ("Ready", "False", "1")), True, None, "3", id="starts"),
        pytest.param(_raw(("PodScheduled", "True", "3"), ("Ready", "False", "9")), True, None, "9", id="was ready"),
        pytest.param(_raw(("PodScheduled", "True", "3"), ("Ready", "True", "9")), True, None, None, id="ready"),
        pytest.param(_raw(), False, None, None, id="new"),
    ],
)
def test_the_node_of_a_pod(raw: dict[str, Any], has_node: bool, waits: str | None, stuck: str | None) -> None:
    """The view stores a pod without its spec."""
    pod = pod_of(trimmed(raw | {"kind": "Pod"}))
    assert (pod.has_node, pod.waits_since, pod.stuck_since) == (has_node, waits, stuck)
