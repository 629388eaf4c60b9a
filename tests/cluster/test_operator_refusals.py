"""Foreign objects, refusals by the API server and users' changes of children are reported or repaired."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient
from octavo_operator.cluster.client import Raw, path_of
from octavo_operator.cluster.reconciler import LOAD_EVERY_S
from octavo_operator.spec.service import KIND
from octavo_testing.control_plane import ControlPlane
from octavo_testing.infsvc_cases import HOST, OPEN, Case
from octavo_testing.simulated_operator import (
    MERGE,
    STRATEGIC,
    SimulatedNodes,
    SimulatedOperator,
    connected,
    event_counts,
    namespace_state,
)

NAME = "llm"


class ServiceNamespace:
    """A namespace with one service, an operator and simulated nodes."""

    def __init__(self, plane: ControlPlane, api: ApiClient, namespace: str) -> None:
        self.plane = plane
        self._api = api
        self.namespace = namespace
        self.nodes = SimulatedNodes(plane, namespace)
        self.operator = SimulatedOperator(api, namespace, self.nodes)

    def serve(self, **spec: Any) -> None:
        self.plane.call("POST", path_of(KIND, self.namespace), Case("", spec, name=NAME).manifest())

    async def settle(self) -> Raw:
        await self.operator.settle(self.nodes)
        return self.get(KIND, NAME)

    def replace_operator(self) -> None:
        self.operator = SimulatedOperator(self._api, self.namespace, self.nodes)

    def make(self, kind: str, name: str, **content: Any) -> Raw:
        found: Raw = self.plane.call("POST", path_of(kind, self.namespace), {"metadata": {"name": name}} | content)
        return found

    def get(self, kind: str, name: str) -> Raw:
        found: Raw = self.plane.call("GET", path_of(kind, self.namespace, name))
        return found

    def change(self, kind: str, name: str, change: Raw, *, part: str = "") -> None:
        self.plane.call("PATCH", path_of(kind, self.namespace, name) + part, change, kind=MERGE)

    def remove(self, kind: str, name: str) -> None:
        self.plane.call("DELETE", path_of(kind, self.namespace, name))

    @property
    def event_counts(self) -> dict[str, int]:
        return dict(event_counts(self.plane, self.namespace))

    @property
    def namespace_state(self) -> dict[str, Any]:
        return namespace_state(self.plane, self.namespace)


@pytest.fixture
async def stage(plane: ControlPlane, plane_namespace: str) -> AsyncIterator[ServiceNamespace]:
    async with connected(plane) as api:
        yield ServiceNamespace(plane, api, plane_namespace)


def _condition(service: Raw, type_: str) -> Raw:
    return next(c for c in service["status"]["conditions"] if c["type"] == type_)


async def test_a_users_object_with_a_childs_name_is_not_changed(stage: ServiceNamespace) -> None:
    theirs = stage.make("ServiceAccount", f"{NAME}-engine")
    stage.serve()
    service = await stage.settle()
    assert _condition(service, "Ready")["reason"] == "NameTaken"
    assert f"ServiceAccount {NAME}-engine" in _condition(service, "Ready")["message"]
    assert stage.get("ServiceAccount", f"{NAME}-engine")["metadata"] == theirs["metadata"]
    assert stage.get("Deployment", f"{NAME}-router")  # the other children exist
    stage.remove("ServiceAccount", f"{NAME}-engine")
    assert _condition(await stage.settle(), "Ready")["reason"] == "Serving"
    assert (stage.event_counts["NameTaken"], stage.event_counts["Applied"]) == (1, 1)


async def test_services_with_clashing_names_do_not_overwrite_each_other(stage: ServiceNamespace) -> None:
    """`llm-engines` is also the name of the headless Service of `llm`."""
    stage.serve()
    await stage.settle()
    before = stage.get("Service", f"{NAME}-engines")
    stage.plane.call("POST", path_of(KIND, stage.namespace), Case("", {}, name=f"{NAME}-engines").manifest())
    await stage.settle()
    assert (
        stage.get("Service", f"{NAME}-engines")["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    )
    assert _condition(stage.get(KIND, NAME), "Ready")["reason"] == "Serving"
    assert _condition(stage.get(KIND, f"{NAME}-engines"), "Ready")["reason"] == "NameTaken"


async def test_a_refused_child_is_reported_and_the_others_are_created(stage: ServiceNamespace) -> None:
    quota = path_of("ServiceAccount", stage.namespace).replace("serviceaccounts", "resourcequotas")
    hard = {"count/ingresses.networking.k8s.io": "0"}
    stage.plane.call("POST", quota, {"metadata": {"name": "none"}, "spec": {"hard": hard}})
    stage.plane.call("PATCH", f"{quota}/none/status", {"status": {"hard": hard, "used": hard}}, kind=MERGE)
    stage.serve(exposure=HOST, auth=OPEN)
    service = await stage.settle()
    assert _condition(service, "Ready")["reason"] == "Refused"
    assert "exceeded quota: none" in _condition(service, "Ready")["message"]
    assert _condition(service, "ReplicasAdmitted")["reason"] == "AllAdmitted"
    stage.plane.call("DELETE", f"{quota}/none")
    assert _condition(await stage.settle(), "Ready")["reason"] == "Serving"


@pytest.mark.parametrize("lacks", ["secret", "configmap"])
async def test_a_secret_that_a_pod_lacks_is_created_again(stage: ServiceNamespace, lacks: str) -> None:
    stage.serve()
    await stage.settle()
    secret = f"{NAME}-router-admin-secret"
    stage.remove("Secret", secret)
    pods = stage.plane.call("GET", path_of("Pod", stage.namespace))["items"]
    router, *_ = [pod["metadata"]["name"] for pod in pods if f"{NAME}-router" in pod["metadata"]["name"]]
    waiting = {"reason": "CreateContainerConfigError", "message": f'{lacks} "{secret}" not found'}
    container = {"name": "main", "ready": False, "restartCount": 0, "image": "x", "imageID": ""}
    conditions = [{"type": type_, "status": "False"} for type_ in ("Ready", "ContainersReady")]
    status = {"conditions": conditions, "containerStatuses": [container | {"state": {"waiting": waiting}}]}
    path = path_of("Pod", stage.namespace, router) + "/status"
    stage.plane.call("PATCH", path, {"status": status}, kind=STRATEGIC)
    await stage.settle()
    found = {each["metadata"]["name"] for each in stage.plane.call("GET", path_of("Secret", stage.namespace))["items"]}
    assert (secret in found) == (lacks == "secret")


async def test_a_misspelt_field_is_named_and_the_running_revision_is_scaled(stage: ServiceNamespace) -> None:
    stage.serve()
    await stage.settle()
    stage.change(KIND, NAME, {"spec": {"affinity": {"nodeAffinty": {}}}})
    found = _condition(await stage.settle(), "ChildrenApplied")
    assert (found["reason"], "nodeAffinty" in found["message"]) == ("Refused", True)
    stage.change(KIND, NAME, {"spec": {"replicas": 2}})
    assert (await stage.settle())["status"]["replicas"]["ready"] == 2
    stage.change(KIND, NAME, {"spec": {"affinity": None}})
    assert _condition(await stage.settle(), "Ready")["reason"] == "Serving"


async def test_a_spec_of_a_newer_crd_is_refused_and_pods_stay(stage: ServiceNamespace) -> None:
    stage.serve()
    await stage.settle()
    before = stage.namespace_state
    raw = stage.get(KIND, NAME)
    newer = raw | {"spec": raw["spec"] | {"shiny": True}}
    newer["metadata"] = raw["metadata"] | {"generation": 2, "resourceVersion": raw["metadata"]["resourceVersion"] + "0"}
    stage.operator.view.update(newer)
    await stage.operator.reconcile()
    service = stage.get(KIND, NAME)
    assert [_condition(service, type_)["reason"] for type_ in ("Accepted", "Ready")] == ["InvalidSpec"] * 2
    assert "spec.shiny" in _condition(service, "Accepted")["message"]
    assert {k: v for k, v in stage.namespace_state.items() if "status" not in k} == {
        k: v for k, v in before.items() if "status" not in k
    }
    assert stage.event_counts["InvalidSpec"] == 1


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("Deployment", f"{NAME}-router", {"spec": {"replicas": 7}}),
        ("Service", NAME, {"spec": {"selector": {"serving.octavo.dev/router": "wrong"}}}),
        ("Service", NAME, {"metadata": {"labels": None}}),
        ("Service", NAME, {"metadata": {"ownerReferences": None}}),
        ("PodDisruptionBudget", f"{NAME}-engine", {"spec": {"minAvailable": "100%"}}),
        ("NetworkPolicy", f"{NAME}-engine", {"spec": {"ingress": None}}),
        ("Service", f"{NAME}-engines", None),
        ("NetworkPolicy", f"{NAME}-router", None),
        ("ServiceAccount", f"{NAME}-router", None),
        ("Deployment", f"{NAME}-router", None),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
async def test_a_users_change_of_a_child_is_undone(
    stage: ServiceNamespace, kind: str, name: str, change: Raw | None
) -> None:
    stage.serve()
    await stage.settle()
    before = stage.namespace_state
    if change is None:
        stage.remove(kind, name)
    else:
        stage.change(kind, name, change)
    await stage.settle()
    assert stage.namespace_state == before
    assert stage.event_counts["ChildRepaired"] == 1


async def test_fields_that_a_user_adds_to_a_child_stay(stage: ServiceNamespace) -> None:
    stage.serve()
    await stage.settle()
    stage.change("Service", NAME, {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "mine"}}})
    placed = {
        "spec": {"template": {"spec": {"nodeSelector": {"disk": "ssd"}}}}
    }  # a field that the operator does not set
    stage.change("Deployment", f"{NAME}-router", placed)
    writes = stage.operator.cluster.num_writes
    await stage.settle()
    assert stage.operator.cluster.num_writes == writes
    stage.change(KIND, NAME, {"spec": {"router": {"replicas": 1}}})
    stage.change("Service", NAME, {"spec": {"selector": {"serving.octavo.dev/router": "wrong"}}})
    await stage.settle()
    metadata = stage.get("Service", NAME)["metadata"]
    assert (metadata["labels"]["team"], metadata["annotations"]["note"]) == ("a", "mine")
    assert stage.get("Deployment", f"{NAME}-router")["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "ssd"}


async def test_a_users_copy_of_a_child_is_not_deleted(stage: ServiceNamespace) -> None:
    stage.serve()
    await stage.settle()
    labels = stage.get("Service", NAME)["metadata"]["labels"]
    ports = [{"port": 80}]
    stage.make("Service", "mine", metadata={"name": "mine", "labels": labels}, spec={"ports": ports})
    await stage.settle()
    assert stage.get("Service", "mine")


async def test_a_restarted_operator_repeats_no_events(stage: ServiceNamespace) -> None:
    stage.serve(router={"ref": {"name": "missing"}})
    assert _condition(await stage.settle(), "Ready")["reason"] == "RouterNotFound"
    for _ in range(3):
        stage.replace_operator()
        await stage.settle()
    assert stage.event_counts == {"RouterNotFound": 1, "RollingOut": 1}


async def test_repeated_trouble_raises_the_count_of_one_event(stage: ServiceNamespace) -> None:
    stage.serve(router={"ref": {"name": "missing"}})
    await stage.settle()
    for ref in (None, {"name": "missing"}, None, {"name": "missing"}):
        stage.change(KIND, NAME, {"spec": {"router": {"ref": ref}}})
        await stage.settle()
    assert stage.event_counts["RouterNotFound"] == 3
    events = stage.plane.call("GET", path_of("Event", stage.namespace))["items"]
    assert [e["series"]["count"] for e in events if e["reason"] == "RouterNotFound"] == [3]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: q', "QuotaExceeded"),
        ('violates PodSecurity "restricted"', "PodRefused"),
    ],
)
async def test_pods_that_cannot_be_created_are_reported(stage: ServiceNamespace, message: str, reason: str) -> None:
    stage.serve(replicas=2)
    await stage.operator.watch()
    await stage.operator.reconcile()
    (engine,) = [
        d["metadata"]["name"]
        for d in stage.plane.call("GET", path_of("Deployment", stage.namespace))["items"]
        if "-engine-" in d["metadata"]["name"]
    ]
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    stage.change("Deployment", engine, {"status": {"conditions": [failure]}}, part="/status")
    await stage.operator.watch()
    await stage.operator.reconcile()
    assert _condition(stage.get(KIND, NAME), "Ready")["reason"] == reason
    assert stage.event_counts[reason] == 1


async def test_load_is_written_at_intervals_and_other_changes_at_once(stage: ServiceNamespace) -> None:
    stage.serve()
    await stage.settle()
    operator = stage.operator
    stage.nodes.num_running = 7
    await operator.reconcile()
    assert stage.get(KIND, NAME)["status"]["load"]["running"] == 0
    operator.now_s += LOAD_EVERY_S
    await operator.reconcile()
    assert stage.get(KIND, NAME)["status"]["load"]["running"] == 7
    stage.nodes.num_running = 8
    stage.change(KIND, NAME, {"spec": {"replicas": 2}})
    assert (await stage.settle())["status"]["load"]["running"] == 8
