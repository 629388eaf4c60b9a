"""What is made of watched objects: pods and their troubles, which services a change concerns, what one service has."""

from typing import Any

import pytest
from octavo_operator.cluster.pods import pod_of, router_trouble
from octavo_operator.cluster.reports import report_of
from octavo_operator.cluster.view import View
from octavo_operator.names import ADMITTED_EPOCH, ADMITTED_GATE, REVISION_LABEL, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.observed import ModelSize, RouterReport
from octavo_operator.service import read_service
from octavo_testing.infsvc_cases import HOST, OPEN, Case, stored


def _pod(*, component: str = "engine", service: str = "llm", router: str = "llm", **status: Any) -> dict[str, Any]:
    labels = {SERVICE_LABEL: service, ROUTER_LABEL: router, REVISION_LABEL: "r1"}
    labels["app.kubernetes.io/component"] = component
    metadata = {"name": f"{service}-{component}-0", "namespace": "default", "uid": "u", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


def _condition(type_: str, status: str, message: str = "") -> dict[str, str]:
    return {"type": type_, "status": status, "message": message}


def _container(name: str = "engine", **fields: Any) -> dict[str, Any]:
    return {"name": name, "restartCount": 0, "state": {}} | fields


def _service(name: str, created: str = "2026-01-01T00:00:00Z", **spec: Any) -> dict[str, Any]:
    raw = stored(Case("", spec, name=name))
    raw["metadata"]["creationTimestamp"] = created
    return raw


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
FAILED = {"terminated": {"exitCode": 1, "message": "loading\noctavo: /models/x: no such file or folder.\n"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


@pytest.mark.parametrize(
    ("status", "trouble", "says"),
    [
        ({}, None, ""),
        ({"conditions": [_condition("PodScheduled", "False", "0/1 nodes")]}, "Unschedulable", "0/1 nodes"),
        (
            {"containerStatuses": [_container(state={"waiting": {"reason": "ErrImagePull", "message": "no host"}})]},
            "ImagePullError",
            "no host",
        ),
        (
            {"containerStatuses": [_container(state={"waiting": {"reason": "CreateContainerConfigError"}})]},
            "ConfigError",
            "",
        ),
        ({"containerStatuses": [_container(state=BACK_OFF, lastState=FAILED)]}, "CrashLoop", "no such file or folder"),
        ({"containerStatuses": [_container(state=BACK_OFF, lastState=KILLED)]}, "OOMKilled", "more memory"),
        ({"initContainerStatuses": [_container("fetch", state=FAILED)]}, "FetchFailed", "no such file"),
        (
            {
                "initContainerStatuses": [_container("fetch", state={"terminated": {"exitCode": 0}})],
                "containerStatuses": [_container(state={"waiting": {"reason": "PodInitializing"}})],
            },
            None,
            "",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_pod(status: dict[str, Any], trouble: str | None, says: str) -> None:
    found = pod_of(_pod(**status))
    assert (found.trouble, says in found.message) == (trouble, True)


CODED = {"terminated": {"exitCode": 1, "message": '{"code": "ModelNotFound", "message": "/models/x: no such file."}'}}
NOT_CODED = ("octavo: bad flag", "[1, 2]", '{"code": 1, "message": "x"}', '{"message": "x"}', "")


def test_the_code_of_a_termination_message_is_read() -> None:
    found = pod_of(_pod(containerStatuses=[_container(state=BACK_OFF, lastState=CODED)]))
    assert (found.trouble, found.failure_code) == ("CrashLoop", "ModelNotFound")
    assert found.message == "exit code 1: /models/x: no such file."


@pytest.mark.parametrize("text", NOT_CODED)
def test_the_end_of_a_log_is_a_message_without_a_code(text: str) -> None:
    ended = {"terminated": {"exitCode": 1, "message": f"loading\n{text}\n" if text else ""}}
    found = pod_of(_pod(containerStatuses=[_container(state=BACK_OFF, lastState=ended)]))
    assert (found.trouble, found.failure_code) == ("CrashLoop", "")
    assert found.message == "exit code 1" + (f": {text}" if text else "")


def test_a_pod_that_answers_has_no_trouble_of_the_past() -> None:
    container = _container(state={"running": {}}, lastState=FAILED, restartCount=1)
    conditions = [_condition("ContainersReady", "True"), _condition(ADMITTED_GATE, "True", "admitted")]
    raw = _pod(conditions=conditions, containerStatuses=[container])
    raw["metadata"]["annotations"] = {ADMITTED_EPOCH: "00ff"}
    found = pod_of(raw)
    assert (found.trouble, found.message, found.restarts) == (None, "", 1)
    assert (found.serves, found.admitted_epoch, found.revision) == (True, "00ff", "r1")


def test_a_router_pod_says_why_it_does_not_come_up() -> None:
    assert router_trouble(_pod(component="router")) == ""
    image = _container("router", state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    assert "no such image" in router_trouble(_pod(component="router", containerStatuses=[image]))


def test_a_change_concerns_its_service_and_a_routers_all_behind_it() -> None:
    view = View()
    view.update(_service("llm"))
    view.update(_service("other", router={"ref": {"name": "llm"}}))
    assert view.update(_pod()) == {("default", "llm")}
    assert view.update(_pod(component="router")) == {("default", "llm"), ("default", "other")}
    assert view.services_behind_router_of(("default", "llm-router-0")) == {("default", "llm"), ("default", "other")}
    assert view.update(_service("llm"), is_gone=True) == {("default", "llm"), ("default", "other")}


def test_who_had_a_host_first_keeps_it_and_the_next_gets_it_when_it_goes() -> None:
    view = View()
    first = _service("zz", "2026-01-01T00:00:00Z", exposure=HOST, auth=OPEN)
    second = _service("aa", "2026-01-02T00:00:00Z", exposure=HOST, auth=OPEN)
    view.update(first)
    assert view.update(second) == {("default", "zz"), ("default", "aa")}
    assert view.observed(read_service(second), {}).host_owner == "default/zz"
    assert view.observed(read_service(first), {}).host_owner is None
    assert ("default", "aa") in view.update(first, is_gone=True)
    assert view.observed(read_service(second), {}).host_owner is None


def _seen_pods(view: View) -> list[str]:
    return [pod.name for pod in view.observed(read_service(_service("llm")), {}).pods]


def test_what_loses_our_label_is_no_longer_there() -> None:
    view = View()
    pod = _pod()
    view.update(pod)
    bare = {**pod, "metadata": {k: v for k, v in pod["metadata"].items() if k != "labels"}}
    assert view.contains(bare)
    assert view.update(bare) == {("default", "llm")}
    assert not view.contains(bare)
    assert _seen_pods(view) == []


def test_what_gets_the_label_of_another_service_is_that_ones() -> None:
    view = View()
    view.update(_pod())
    moved = _pod()
    moved["metadata"]["labels"][SERVICE_LABEL] = "other"
    assert view.update(moved) == {("default", "llm"), ("default", "other")}
    assert _seen_pods(view) == []


def _deployment(revision: str = "r1", **more: Any) -> dict[str, Any]:
    labels = {SERVICE_LABEL: "llm", REVISION_LABEL: revision, "app.kubernetes.io/managed-by": "octavo-operator"}
    metadata = {"name": f"llm-engine-{revision}", "namespace": "default", "uid": "u", "labels": labels}
    metadata |= {"creationTimestamp": "1", "resourceVersion": "7"} | more.pop("metadata", {})
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": 2}} | more


def test_why_pods_cannot_be_made_is_the_deployments_word() -> None:
    view = View()
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}
    view.update(_deployment(status={"conditions": [failure]}))
    (found,) = view.observed(read_service(_service("llm")), {}).engine_deployments
    assert (found.failure, found.version, found.replicas) == ("exceeded quota: q", "7", 2)
    view.update(_deployment(status={"conditions": [failure | {"status": "False"}]}))
    assert view.observed(read_service(_service("llm")), {}).engine_deployments[0].failure == ""


def test_a_deployment_that_another_controls_is_no_engine_set() -> None:
    view = View()
    theirs = {"apiVersion": "x/v1", "kind": "Other", "name": "x", "uid": "9", "controller": True}
    view.update(_deployment(metadata={"ownerReferences": [theirs]}))
    seen = view.observed(read_service(_service("llm")), {})
    assert seen.engine_deployments == ()
    assert list(seen.engine_manifests) == ["llm-engine-r1"]


def test_a_shared_router_must_be_one_that_is_there() -> None:
    view = View()
    sharing = _service("a", router={"ref": {"name": "b"}})
    view.update(sharing)
    assert view.observed(read_service(sharing), {}).router_owner is None
    view.update(_service("b", router={"ref": {"name": "c"}}))
    assert view.observed(read_service(sharing), {}).router_owner is None
    view.update(_service("b"))
    assert view.observed(read_service(sharing), {}).router_owner == "b"


def test_what_is_observed_of_a_service() -> None:
    view = View()
    view.update(_service("llm"))
    ready = [_condition("Ready", "True")]
    view.update(_pod())
    view.update(_pod(component="router", conditions=ready))
    seen = view.observed(read_service(_service("llm")), {"llm-router-0": RouterReport(pod="llm-router-0")})
    assert [pod.name for pod in seen.pods] == ["llm-engine-0"]
    assert list(seen.routers) == ["llm-router-0"]
    view.update(_pod(), is_gone=True)
    assert view.observed(read_service(_service("llm")), {}).pods == ()


SIZE = {"max_model_len": 2048, "weights_bytes": 270 << 20, "kv_bytes": 256 << 20, "kv_tokens": 4096}


def test_a_report_counts_blocks_that_are_held_not_those_that_are_only_cached() -> None:
    load = {"total_blocks": 100, "free_blocks": 50, "cached_blocks": 30, "running": 2, "waiting": 1}
    replicas = [
        {"name": "a", "acknowledged_epoch": "01", "models": ["m"], "load": load, "model": SIZE | {"later": 1}},
        {"name": "b", "acknowledged_epoch": None, "models": [], "load": {}},
    ]
    report = report_of("router", replicas)
    assert report.admitted == {"a": "01"}
    assert report.sizes == {"a": ModelSize(**SIZE)}
    assert (report.kv_usage, report.running, report.waiting) == (pytest.approx(0.2), 2, 1)


def test_what_is_gone_leaves_nothing_behind() -> None:
    view = View()
    seen = [_service("a", exposure=HOST), _service("b", router={"ref": {"name": "a"}}), _deployment()]
    seen.append(_pod(component="router", service="a", router="a"))
    for raw in seen:
        view.update(raw)
    for raw in seen:
        view.update(raw, is_gone=True)
    assert view == View()
