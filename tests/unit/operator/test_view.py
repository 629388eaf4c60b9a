"""The view: troubles of pods, the services that a change concerns, and the observed state of a service."""

import json
from typing import Any

import pytest
from octavo_operator.cluster.pods import missing_secrets, pod_of, router_trouble
from octavo_operator.cluster.router_state import RouterState
from octavo_operator.cluster.view import View
from octavo_operator.names import ADMITTED_EPOCH, ADMITTED_GATE, REVISION_LABEL, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.observed import Load, ModelSize, Observed, RouterReport, ServiceBehind
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
        ({"initContainerStatuses": [_container("fetch", state=BACK_OFF, lastState=KILLED)]}, "FetchFailed", "prefetch"),
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
def test_the_trouble_of_a_pod_is_found(status: dict[str, Any], trouble: str | None, says: str) -> None:
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


def test_a_ready_pod_has_no_trouble_from_earlier_failures() -> None:
    container = _container(state={"running": {}}, lastState=FAILED, restartCount=1)
    conditions = [_condition(type_, "True") for type_ in ("ContainersReady", "Ready", ADMITTED_GATE)]
    raw = _pod(conditions=conditions, containerStatuses=[container])
    raw["metadata"]["annotations"] = {ADMITTED_EPOCH: "00ff"}
    found = pod_of(raw)
    assert (found.trouble, found.message, found.restarts) == (None, "", 1)
    assert (found.serves, found.admitted_epoch, found.revision) == (True, "00ff", "r1")


@pytest.mark.parametrize(
    ("reason", "trouble", "is_ready"),
    [({}, "NodeLost", False), ({"reason": "ReadinessGatesNotReady"}, None, True)],
    ids=["a dead node", "a kubelet that has not seen the open gate yet"],
)
def test_a_pod_whose_own_condition_is_not_true_does_not_serve(
    reason: dict[str, str], trouble: str | None, is_ready: bool
) -> None:
    conditions = [_condition(type_, "True") for type_ in ("ContainersReady", ADMITTED_GATE)]
    found = pod_of(_pod(conditions=[*conditions, {"type": "Ready", "status": "False"} | reason]))
    assert (found.serves, found.trouble, found.is_ready) == (False, trouble, is_ready)


def test_the_trouble_of_a_router_pod_is_found() -> None:
    assert router_trouble(_pod(component="router")) == ""
    image = _container("router", state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    assert "no such image" in router_trouble(_pod(component="router", containerStatuses=[image]))


def test_a_router_change_concerns_all_services_behind_it() -> None:
    view = View()
    view.update(_service("llm"))
    view.update(_service("other", router={"ref": {"name": "llm"}}))
    assert view.update(_pod()) == {("default", "llm")}
    assert view.update(_pod(component="router")) == {("default", "llm"), ("default", "other")}
    assert view.services_behind_router_of(("default", "llm-router-0")) == {("default", "llm"), ("default", "other")}
    assert view.update(_service("llm"), is_gone=True) == {("default", "llm"), ("default", "other")}


def test_a_host_belongs_to_the_oldest_service() -> None:
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


def test_an_object_without_the_label_leaves_the_view() -> None:
    view = View()
    pod = _pod()
    view.update(pod)
    bare = {**pod, "metadata": {k: v for k, v in pod["metadata"].items() if k != "labels"}}
    assert view.contains(bare)
    assert view.update(bare) == {("default", "llm")}
    assert not view.contains(bare)
    assert _seen_pods(view) == []


def test_a_relabeled_object_moves_to_the_other_service() -> None:
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


def test_the_deployments_replica_failure_is_observed() -> None:
    view = View()
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}
    view.update(_deployment(status={"conditions": [failure]}))
    (found,) = view.observed(read_service(_service("llm")), {}).engine_deployments
    assert (found.failure, found.exceeds_quota, found.version, found.replicas) == ("exceeded quota: q", True, "7", 2)
    view.update(_deployment(status={"conditions": [failure | {"status": "False"}]}))
    assert view.observed(read_service(_service("llm")), {}).engine_deployments[0].failure == ""


def test_a_foreign_deployment_is_not_an_engine_deployment() -> None:
    view = View()
    theirs = {"apiVersion": "x/v1", "kind": "Other", "name": "x", "uid": "9", "controller": True}
    view.update(_deployment(metadata={"ownerReferences": [theirs]}))
    seen = view.observed(read_service(_service("llm")), {})
    assert seen.engine_deployments == ()
    assert list(seen.engine_manifests) == ["llm-engine-r1"]


def test_a_model_name_behind_one_router_belongs_to_the_first_service() -> None:
    def sharing(name: str, *models: str) -> dict[str, Any]:
        return _service(name, router={"ref": {"name": "a"}}, model={"uri": "pkg://x", "servedNames": [*models]})

    def taken(view: View, name: str) -> dict[str, str]:
        return dict(view.observed(read_service(view.services["default", name]), {}).taken_models)

    view = View()
    for raw in (_service("a"), sharing("b", "a", "llama"), sharing("c", "llama"), _service("llama")):
        view.update(raw)
    assert {name: taken(view, name) for name in ("a", "b", "c", "llama")} == {
        "a": {},
        "b": {"a": "a"},
        "c": {"llama": "b"},
        "llama": {},
    }
    edited = sharing("b", "other")
    edited["metadata"]["resourceVersion"] = "2"
    assert ("default", "c") in view.update(edited)
    assert (taken(view, "b"), taken(view, "c")) == ({}, {})


def test_a_shared_router_must_exist() -> None:
    view = View()
    sharing = _service("a", router={"ref": {"name": "b"}})
    view.update(sharing)
    assert view.observed(read_service(sharing), {}).router_owner is None
    view.update(_service("b", router={"ref": {"name": "c"}}))
    assert view.observed(read_service(sharing), {}).router_owner is None
    view.update(_service("b"))
    assert view.observed(read_service(sharing), {}).router_owner == "b"


def test_pods_keep_their_router_while_the_spec_names_none_that_exists() -> None:
    view = View()
    view.update(_service("llm"))
    view.update(_pod(component="router", conditions=[_condition("Ready", "True")]))
    view.update(_pod())
    lost = _service("llm", router={"ref": {"name": "typo"}})
    lost["metadata"]["resourceVersion"] = "2"
    view.update(lost)
    seen = view.observed(read_service(lost), {"llm-router-0": RouterReport(pod="llm-router-0")})
    assert (seen.router_owner, list(seen.routers)) == (None, ["llm-router-0"])
    assert view.services_behind_router_of(("default", "llm-router-0")) == {("default", "llm")}


def _sharing(name: str, *models: str, version: str = "1") -> dict[str, Any]:
    """A service that uses the router of `llm`. Its manifest is older than others."""
    raw = _service(
        name,
        "2025-01-01T00:00:00Z",
        router={"ref": {"name": "llm"}},
        model={"uri": "pkg://x", "servedNames": [*models]},
    )
    raw["metadata"]["resourceVersion"] = version
    return raw


def _router(*allow_from: str, version: str = "1") -> dict[str, Any]:
    raw = _service("llm", router={"allowFrom": [*allow_from]})
    raw["metadata"]["resourceVersion"] = version
    return raw


def _engine(service: str, *models: str, router: str = "llm") -> dict[str, Any]:
    """An engine Deployment."""
    raw = _deployment(metadata={"name": f"{service}-engine-r1"})
    raw["metadata"]["labels"] = raw["metadata"]["labels"] | {SERVICE_LABEL: service, ROUTER_LABEL: router}
    args = ["serve", "/models", "--port=1", "--served-model-name", *models, "--drain-timeout=5"]
    template = {"spec": {"containers": [{"name": "agent"}, {"name": "engine", "args": args}]}}
    return raw | {"spec": {"replicas": 0, "template": template}}


def _seen(view: View, name: str) -> Observed:
    return view.observed(read_service(view.services["default", name]), {})


def test_a_service_that_a_router_does_not_admit_takes_no_model_name() -> None:
    view = View()
    for raw in (_router("friend"), _sharing("friend", "b"), _sharing("stranger", "llm", "b", "c")):
        view.update(raw)
    assert [_seen(view, name).may_use_router for name in ("llm", "friend", "stranger")] == [True, True, False]
    assert [dict(_seen(view, name).taken_models) for name in ("llm", "friend")] == [{}, {}]
    assert _seen(view, "llm").behind_router == {"llm": ServiceBehind(("llm",)), "friend": ServiceBehind(("b",))}
    assert view.models_of(("default", "stranger")) == set()

    changed = view.update(_router("friend", "stranger", version="2"))
    assert ("default", "stranger") in changed
    assert _seen(view, "stranger").may_use_router
    assert dict(_seen(view, "llm").taken_models) == {"llm": "stranger"}


def test_a_service_that_a_router_admitted_keeps_the_model_names_that_its_engines_serve() -> None:
    """Even without replicas, as it can be scaled. An edit of its spec takes no other name."""
    view = View()
    for raw in (_router(), _sharing("former", "a", "b"), _engine("former", "a", "b")):
        view.update(raw)
    view.update(
        _service("younger", router={"ref": {"name": "llm"}}, model={"uri": "pkg://x", "servedNames": ["a", "c"]})
    )
    view.update(_router("younger", version="2"))
    assert not _seen(view, "former").may_use_router
    assert dict(_seen(view, "younger").taken_models) == {"a": "former"}
    view.update(_sharing("former", "c", version="2"))
    assert view.models_of(("default", "former")) == {"a", "b"}
    assert dict(_seen(view, "younger").taken_models) == {"a": "former"}
    assert _seen(view, "llm").behind_router["former"] == ServiceBehind(("a", "b"))

    view.update(_engine("former", "a", "b"), is_gone=True)
    assert dict(_seen(view, "younger").taken_models) == {}
    assert "former" not in _seen(view, "llm").behind_router


def test_pods_keep_their_router_while_the_spec_names_one_that_does_not_admit_them() -> None:
    view = View()
    view.update(_router("friend"))
    view.update(_service("own"))
    view.update(_engine("own", "own", router="own"))
    view.update(_pod(service="own", router="own"))
    view.update(_pod(component="router", service="own", router="own", conditions=[_condition("Ready", "True")]))
    moved = _sharing("own", "own", version="2")
    view.update(moved)
    seen = _seen(view, "own")
    assert (seen.may_use_router, list(seen.routers)) == (False, ["own-router-0"])
    assert view.models_of(("default", "own")) == set(), "its engines are not behind that router"


def test_a_router_of_an_unreadable_service_admits_the_same_services() -> None:
    view = View()
    newer = _router("friend")
    newer["spec"]["router"]["newField"] = True
    for raw in (newer, _sharing("friend", "b"), _sharing("stranger", "c")):
        view.update(raw)
    assert [_seen(view, name).may_use_router for name in ("friend", "stranger")] == [True, False]


def test_the_models_behind_a_router_are_those_of_all_its_services() -> None:
    view = View()
    owner = _service("llm")
    view.update(owner)
    view.update(_service("other", "2026-01-02T00:00:00Z", router={"ref": {"name": "llm"}},
                         model={"uri": "pkg://m", "servedNames": ["b", "a", "llm"]}))  # fmt: skip
    view.update(_service("alone"))
    assert view.observed(read_service(owner), {}).behind_router == {
        "llm": ServiceBehind(("llm",)),
        "other": ServiceBehind(("a", "b")),
    }
    assert view.update(_service("other", router={"ref": {"name": "llm"}}), is_gone=True) >= {("default", "llm")}
    assert view.observed(read_service(owner), {}).behind_router == {"llm": ServiceBehind(("llm",))}


def test_adapters_are_claimed_behind_a_models_name() -> None:
    """A service with an adapter takes no name from a service whose model has it, even from a younger one."""
    view, shared = View(), {"router": {"ref": {"name": "llm"}}}
    listed = [{"name": name, "uri": "hf://team/x"} for name in ("x", "y", "young")]
    view.update(_service("llm", adapters=listed))
    view.update(_service("young", "2026-01-02T00:00:00Z", adapters=[{"name": "y", "uri": "hf://team/y"}], **shared))
    assert dict(_seen(view, "llm").taken_models) == {"young": "young"}
    assert dict(_seen(view, "young").taken_models) == {"y": "llm"}
    assert _seen(view, "llm").behind_router == {
        "llm": ServiceBehind(("llm",), ("x", "y")),
        "young": ServiceBehind(("young",)),
    }
    assert view.models_of(("default", "llm")) == {"llm", "x", "y"}
    assert ("default", "young") in view.update(_service("llm"), is_gone=False)
    assert dict(_seen(view, "young").taken_models) == {}


def test_the_observed_state_has_all_parts() -> None:
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


def test_kv_usage_counts_blocks_of_running_requests_only() -> None:
    load = {"total_blocks": 100, "free_blocks": 50, "cached_blocks": 30, "running": 2, "waiting": 1}
    replicas = [
        {
            "name": "a",
            "acknowledged_epoch": "01",
            "models": ["m"],
            "load": load,
            "model": SIZE | {"later": 1},
            "revision": "c1",
            "startup_s": {"import": 2.5, "weights": 30, "later": 1.0},
            "withdrawn": False,
            "in_flight": 3,
            "worth_tokens": 40,
        },
        {"name": "b", "acknowledged_epoch": None, "models": [], "load": {}, "withdrawn": True},
    ]
    state = RouterState("router")
    event = {"type": "state", "router": "r1", "state": {"replicas": replicas, "held": {"m": 1}, "requests": {"m": 7}}}
    assert state.update(json.dumps(event).encode(), 5.0) == "held"
    report = state.report({"a", "b", "gone"})
    assert (report.start, report.held, report.requests, report.queue) == ("r1", {"m": 1}, {"m": 7}, {})
    assert report.load_times == {"a": 5.0, "b": 5.0}
    assert report.admitted == {"a": "01"}
    assert report.sizes == {"a": ModelSize(**SIZE)}
    assert report.revisions == {"a": "c1"}
    assert report.startups == {"a": {"import": 2.5, "weights": 30}, "b": {}}
    assert (report.sends_to, report.in_flight, report.worth_tokens) == ({"a"}, {"a": 3, "b": 0}, {"a": 40, "b": 0})
    assert report.load_of(["a", "b", "gone"]) == Load(running=2, waiting=1, num_blocks=100, num_used_blocks=20)


@pytest.mark.parametrize("number", ["-1", "1e300", "null"])
def test_a_nonsensical_length_of_a_start_is_left_out(number: str) -> None:
    replica = f'{{"name": "a", "startup_s": {{"import": {number}, "weights": 3}}}}'
    state = RouterState("router")
    state.update(f'{{"type": "state", "state": {{"replicas": [{replica}]}}}}'.encode(), 5.0)
    assert state.report({"a"}).startups == {"a": {"weights": 3}}


def test_a_router_may_report_about_the_pods_behind_it() -> None:
    view = View()
    for raw in (
        _pod(component="router"),
        _pod(component="router", service="other", router="other"),
        _pod(),
        _pod(service="guest"),
        _pod(service="other", router="other"),
    ):
        view.update(raw)
    assert view.engines_behind_router_of(("default", "llm-router-0")) == {"llm-engine-0", "guest-engine-0"}
    assert view.engines_behind_router_of(("default", "llm-engine-0")) == frozenset()
    view.update(_pod(service="guest"), is_gone=True)
    assert view.engines_behind_router_of(("default", "llm-router-0")) == {"llm-engine-0"}


def test_removed_objects_leave_no_entries_in_the_view() -> None:
    view = View()
    seen = [_service("a", exposure=HOST), _service("b", router={"ref": {"name": "a"}}), _deployment()]
    seen += [_pod(component="router", service="a", router="a"), _pod(service="b", router="a")]
    for raw in seen:
        view.update(raw)
    for raw in seen:
        view.update(raw, is_gone=True)
    assert view == View()


def test_only_secrets_that_are_not_found_are_missing() -> None:
    container = 'CreateContainerConfigError: secret "llm-router-secret" not found'
    volume = 'FailedMount: MountVolume.SetUp failed for volume "keys" : secret "team-keys" not found'
    others = ('configmap "hf" not found', "couldn't find key hf in Secret ns/llm", 'secrets "x" is forbidden', "")
    assert missing_secrets([container, volume, *others]) == {"llm-router-secret", "team-keys"}
