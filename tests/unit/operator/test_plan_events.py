"""Events of a service, one for each transition and action; and the objects of other owners, which stay unchanged."""

from pathlib import Path
from typing import Any

import pytest
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import desired_engine
from octavo_operator.observed import EngineDeployment, Observed, Pod
from octavo_operator.plan.actions import Apply, CreateOnce, Delete, SetGate
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.conditions import Condition, with_transition_times
from octavo_operator.plan.events import ACT_REASONS, action_event, condition_events
from octavo_operator.plan.owner import is_ours, may_be_deleted
from octavo_operator.plan.plan import Plan, plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "conditions.md"
OTHER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "theirs", "uid": "u9", "controller": True}


def _service(**spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name="llm")))


def _event_reasons(condition: Condition, *, before: Condition | None = None) -> list[tuple[str, str]]:
    rows = [] if before is None else with_transition_times([before], (), generation=1, now="t")
    return [(event.type, event.reason) for event in condition_events([condition], rows)]


def _observed(service: InferenceService, **fields: Any) -> Observed:
    """An observed state in which all children match the spec."""
    children = {(m["kind"], m["metadata"]["name"]): _live(with_digest(m)) for m in desired_children(service, SETTINGS)}
    engine = _live(with_digest(desired_engine(service, SETTINGS, replicas=1)))
    given = {
        "children": children,
        "engine_manifests": {engine["metadata"]["name"]: engine},
        "status": _applied_status(service),
    }
    return Observed(**(given | fields))


def _live(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "metadata": manifest["metadata"] | {"uid": "u1", "resourceVersion": "5"}}


def _applied_status(service: InferenceService) -> dict[str, Any]:
    row = {"type": "ChildrenApplied", "status": "True", "reason": "Applied", "observedGeneration": service.generation}
    return {"conditions": [row]}


def _plan(service: InferenceService, observed: Observed) -> Plan:
    return plan(service, observed, SETTINGS, now="t", new_secrets=SECRETS)


def _reason(planned: Plan, type_: str) -> str:
    return next(row["reason"] for row in planned.status["conditions"] if row["type"] == type_)


@pytest.mark.parametrize(
    ("condition", "before", "expected"),
    [
        (Condition("WorkloadReady", "CrashLoop", "m"), None, [("Warning", "CrashLoop")]),
        (Condition("WorkloadReady", "CrashLoop", "m"), Condition("WorkloadReady", "CrashLoop", "other"), []),
        (
            Condition("WorkloadReady", "OOMKilled", "m"),
            Condition("WorkloadReady", "CrashLoop", "m"),
            [("Warning", "OOMKilled")],
        ),
        (Condition("WorkloadReady", "Starting", "m"), None, []),
        (
            Condition("WorkloadReady", "PodsReady", "m"),
            Condition("WorkloadReady", "CrashLoop", "m"),
            [("Normal", "PodsReady")],
        ),
        (Condition("WorkloadReady", "PodsReady", "m"), Condition("WorkloadReady", "Starting", "m"), []),
        (Condition("Accepted", "Valid", "m"), None, []),
        (Condition("Accepted", "Valid", "m"), Condition("Accepted", "InvalidSpec", "m"), [("Normal", "Valid")]),
        (Condition("Progressing", "RollingOut", "m"), None, [("Normal", "RollingOut")]),
        (
            Condition("Progressing", "Complete", "m"),
            Condition("Progressing", "RollingOut", "m"),
            [("Normal", "Complete")],
        ),
        (Condition("Ready", "Serving", "m"), Condition("Ready", "Starting", "m"), [("Normal", "Serving")]),
        (Condition("Ready", "CrashLoop", "m"), Condition("Ready", "Serving", "m"), []),
        (Condition("ReplicasAdmitted", "NoReplicas", "m"), None, []),
        (Condition("RouterReady", "RouterDegraded", "m"), None, [("Warning", "RouterDegraded")]),
    ],
    ids=lambda value: value.reason if isinstance(value, Condition) else "",
)
def test_a_transition_yields_one_event(
    condition: Condition, before: Condition | None, expected: list[tuple[str, str]]
) -> None:
    assert _event_reasons(condition, before=before) == expected


def test_a_second_plan_has_no_events() -> None:
    service, seen = _service(), Observed(pods=(Pod(name="p", uid="u", revision="r"),))
    first = _plan(service, seen)
    assert [event.reason for event in first.events] == ["RollingOut"]
    assert _plan(service, Observed(pods=seen.pods, status=first.status)).events == ()


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Apply({"kind": "Service", "metadata": {"name": "llm"}}, "it was changed", repairs=True), "ChildRepaired"),
        (Apply({"kind": "Service", "metadata": {"name": "llm"}}, "the spec asks for it", is_new=True), None),
        (SetGate("pod-0", "u", "e1", "every router has its KV snapshot"), "ReplicaAdmitted"),
        (SetGate("pod-0", "u", None, "its engine was restarted"), "ReplicaWithdrawn"),
        (SetGate("pod-0", "u", None, "it is then removed", drains=True), "ReplicaDraining"),
        (Delete("Service", "x", "u", "1", "not asked for"), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_some_actions_have_events(action: Apply | SetGate | Delete, reason: str | None) -> None:
    event = action_event(action)
    assert (None if event is None else event.reason) == reason


def test_every_event_of_an_action_is_documented() -> None:
    rows = [line.split("|")[1].strip(" `") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert set(ACT_REASONS) <= set(rows)


def test_unchanged_children_cause_no_actions() -> None:
    service = _service()
    assert _plan(service, _observed(service)).actions == ()


def test_a_child_changed_by_hand_is_repaired_with_an_event() -> None:
    service = _service()
    seen = _observed(service)
    changed = {**seen.children["Service", "llm"], "spec": {"selector": {}}}
    repaired = _plan(service, _observed(service, children={**seen.children, ("Service", "llm"): changed})).actions
    assert [(a.manifest["kind"], a.repairs, a.is_new) for a in repaired if isinstance(a, Apply)] == [
        ("Service", True, False)
    ]
    without = {ref: live for ref, live in seen.children.items() if ref != ("Service", "llm")}
    made = _plan(service, _observed(service, children=without)).actions
    assert [(a.repairs, a.is_new) for a in made if isinstance(a, Apply)] == [(True, True)]


def test_replicas_changed_by_hand_are_repaired() -> None:
    service = _service(replicas=2)
    engine = _live(with_digest(desired_engine(service, SETTINGS, replicas=2)))
    changed = {**engine, "spec": engine["spec"] | {"replicas": 7}}
    (repair,) = _plan(service, _observed(service, engine_manifests={engine["metadata"]["name"]: changed})).actions
    assert isinstance(repair, Apply)
    assert (repair.manifest["spec"]["replicas"], repair.repairs) == (2, True)


def test_labels_and_annotations_of_users_stay() -> None:
    service = _service()
    seen = _observed(service)
    for live in seen.children.values():
        live["metadata"]["labels"]["team"] = "a"
        live["metadata"]["annotations"]["note"] = "mine"
    assert _plan(service, seen).actions == ()


def test_a_write_for_a_new_spec_is_no_repair() -> None:
    service = _service()
    seen = _observed(service)
    newer = read_service(stored(Case("", {"drain": {"timeoutSeconds": 5}}, name="llm"), generation=2))
    applied = [a for a in _plan(newer, seen).actions if isinstance(a, Apply)]
    assert applied
    assert not any(action.repairs for action in applied)


def test_a_child_of_another_controller_is_never_changed() -> None:
    service = _service()
    seen = _observed(service)
    theirs = {**seen.children["Service", "llm"], "spec": {"selector": {"app": "theirs"}}}
    theirs["metadata"] = theirs["metadata"] | {"ownerReferences": [OTHER]}
    copied = {**theirs, "metadata": theirs["metadata"] | {"name": "llm-copy"}}
    children = {**seen.children, ("Service", "llm"): theirs, ("Service", "llm-copy"): copied}
    planned = _plan(service, _observed(service, children=children))
    assert planned.actions == ()
    assert _reason(planned, "Ready") == "NameTaken"
    assert "ReplicaSet theirs" in next(event.note for event in planned.events if event.reason == "NameTaken")


def test_a_foreign_engine_deployment_is_not_adopted() -> None:
    service = _service()
    engine = _live(with_digest(desired_engine(service, SETTINGS, replicas=5)))
    engine["metadata"] = engine["metadata"] | {"ownerReferences": [OTHER]}
    planned = _plan(service, _observed(service, engine_manifests={engine["metadata"]["name"]: engine}))
    assert planned.actions == ()
    assert _reason(planned, "Ready") == "NameTaken"


@pytest.mark.parametrize(
    ("change", "ours"),
    [
        ({}, True),
        ({"ownerReferences": [OTHER]}, False),
        ({"ownerReferences": []}, True),
        ({"ownerReferences": [], "labels": {}}, False),
        ({"ownerReferences": [], "labels": {"app.kubernetes.io/managed-by": "Helm"}}, False),
    ],
    ids=str,
)
def test_ownership_follows_controller_and_labels(change: dict[str, Any], ours: bool) -> None:
    service = _service()
    live = _observed(service).children["Service", "llm"]
    assert is_ours({**live, "metadata": live["metadata"] | change}, service) is ours


def test_objects_of_an_earlier_service_are_adopted_but_not_deleted() -> None:
    service = _service()
    live = _observed(service).children["Service", "llm"]
    owner = service.owner | {"uid": "an earlier one"}
    left = {**live, "metadata": live["metadata"] | {"ownerReferences": [owner]}}
    assert is_ours(left, service)
    assert not may_be_deleted(left, service.uid)
    assert may_be_deleted(live, service.uid)


def test_a_deleted_router_secret_is_created_again() -> None:
    service = _service()
    for name in ("llm-router-secret", "hf"):
        seen = _observed(service, missing_secrets=frozenset({name}))
        assert [type(a) for a in _plan(service, seen).actions] == [CreateOnce] * (name == "llm-router-secret")
    (made,) = _plan(service, _observed(service, missing_secrets=frozenset({"llm-router-admin-secret"}))).actions
    assert isinstance(made, CreateOnce)
    assert made.manifest["metadata"]["name"] == "llm-router-admin-secret"
    assert made.manifest["stringData"] == {"secret": SECRETS.admin}


def test_a_delete_of_an_older_revision_names_uid_and_version() -> None:
    service = _service(replicas=0)
    old = EngineDeployment(name="llm-engine-old", uid="u2", revision="old", replicas=1, created="1", version="7")
    engine = _live(with_digest(desired_engine(service, SETTINGS, replicas=0)))
    seen = _observed(service, engine_deployments=(old,), engine_manifests={engine["metadata"]["name"]: engine})
    (delete,) = _plan(service, seen).actions
    assert isinstance(delete, Delete)
    assert (delete.uid, delete.version) == ("u2", "7")
