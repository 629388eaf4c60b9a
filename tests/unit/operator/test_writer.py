"""The operator's calls to an API server with scripted responses."""

from collections.abc import Mapping
from typing import Any

import pytest
from octavo_operator.cluster.client import ApiError, Cluster, path_of
from octavo_operator.cluster.event_recorder import SEEN_AT, EventRecorder
from octavo_operator.cluster.pod_events import FIRST_LOOK_S, LONG_WAIT_S, NEXT_LOOK_S, PodSetupEvents
from octavo_operator.cluster.pods import pod_of
from octavo_operator.cluster.view import View
from octavo_operator.cluster.writer import Writer
from octavo_operator.desired.objects import child
from octavo_operator.names import ADAPTER_LIST, ADMITTED_EPOCH
from octavo_operator.observed import Refusal
from octavo_operator.plan.actions import Action, Apply, CreateOnce, Delete, NotifyPod, SetGate, SetReplicas
from octavo_operator.plan.events import ServiceEvent
from octavo_operator.service import InferenceService, read_service
from octavo_testing.infsvc_cases import Case, stored

MISSING = ApiError(404, "NotFound", "not found")
EXISTS = ApiError(409, "AlreadyExists", "already exists")
CHANGED = ApiError(409, "Conflict", "the object has been modified")
FORBIDDEN = ApiError(403, "Forbidden", "exceeded quota: none")


class ScriptedCluster(Cluster):
    """Each call gets the next scripted response; without one it succeeds and returns the request."""

    def __init__(self, *answers: ApiError | dict[str, Any]) -> None:
        self._answers = list(answers)
        self.calls: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> dict[str, Any]:
        self.calls.append((method, path))
        self.bodies.append(dict(body or {}))
        answer = self._answers.pop(0) if self._answers else dict(body or {})
        if isinstance(answer, ApiError):
            raise answer
        return answer


def _service() -> InferenceService:
    return read_service(stored(Case("", {}, name="llm")))


def _child() -> dict[str, Any]:
    return child(_service(), "v1", "Service", "llm", component="router", spec={})


def _listed(**metadata: Any) -> dict[str, Any]:
    found = _child()
    return {"items": [{"metadata": found["metadata"] | metadata, "spec": {}}]}


async def _execute(cluster: ScriptedCluster, action: Action) -> Any:
    return await Writer(cluster, View()).execute(_service(), action, now="t")


async def test_a_new_child_is_applied_only_if_it_does_not_exist() -> None:
    cluster = ScriptedCluster()
    assert await _execute(cluster, Apply(_child(), "why", is_new=True)) is None
    assert cluster.bodies[0]["metadata"]["resourceVersion"] == "1"


async def test_an_existing_object_of_the_service_is_applied() -> None:
    cluster = ScriptedCluster(CHANGED, _listed())
    assert await _execute(cluster, Apply(_child(), "why", is_new=True)) is None
    assert [method for method, _ in cluster.calls] == ["PATCH", "GET", "PATCH"]
    assert "resourceVersion" not in cluster.bodies[2]["metadata"]


async def test_an_existing_object_of_another_owner_is_refused() -> None:
    cluster = ScriptedCluster(CHANGED, _listed(labels={}, ownerReferences=[]))
    found = await _execute(cluster, Apply(_child(), "why", is_new=True))
    assert found == (("Service", "llm"), Refusal("NameTaken", found[1].message))
    assert "give this service another name" in found[1].message
    assert [method for method, _ in cluster.calls] == ["PATCH", "GET"]


async def test_a_conflict_without_an_existing_object_is_retried() -> None:
    with pytest.raises(ApiError, match="modified"):
        await _execute(ScriptedCluster(CHANGED, {"items": []}), Apply(_child(), "why", is_new=True))


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (FORBIDDEN, True),
        (ApiError(422, "Invalid", "spec is immutable"), True),
        (ApiError(500, "InternalError", "failed calling webhook x: refused"), True),
        (ApiError(500, "", "failed to create typed patch object (a/b; v1, Kind=Service): .spec.x: not declared"), True),
        (ApiError(503, "ServiceUnavailable", ""), False),
        (ApiError(429, "TooManyRequests", ""), False),
        (ApiError(401, "Unauthorized", ""), False),
        (CHANGED, False),
    ],
    ids=str,
)
async def test_permanent_refusals_are_returned_and_transient_ones_raised(error: ApiError, stays: bool) -> None:
    if stays:
        assert await _execute(ScriptedCluster(error), Apply(_child(), "why")) == (
            ("Service", "llm"),
            Refusal("Refused", str(error)),
        )
    else:
        with pytest.raises(ApiError):
            await _execute(ScriptedCluster(error), Apply(_child(), "why"))


@pytest.mark.parametrize("error", [ApiError(500, "InternalError", "etcdserver: leader changed"), ApiError(504, "", "")])
async def test_a_failed_write_of_one_object_is_returned(error: ApiError) -> None:
    found = await _execute(ScriptedCluster(error), Apply(_child(), "why"))
    assert found == (("Service", "llm"), Refusal("Retrying", str(error)))


async def test_a_delete_names_the_observed_uid_and_version() -> None:
    cluster = ScriptedCluster()
    await _execute(cluster, Delete("Service", "llm", "u1", "7", "why"))
    assert cluster.bodies[0]["preconditions"] == {"uid": "u1", "resourceVersion": "7"}
    assert await _execute(ScriptedCluster(MISSING), Delete("Service", "llm", "u1", "7", "why")) is None
    with pytest.raises(ApiError):
        await _execute(ScriptedCluster(CHANGED), Delete("Service", "llm", "u1", "7", "why"))


async def test_an_existing_secret_is_neither_read_nor_changed() -> None:
    secret = _child() | {"kind": "Secret"}
    assert await _execute(ScriptedCluster(EXISTS), CreateOnce(secret, "why")) is None
    with pytest.raises(ApiError):
        await _execute(ScriptedCluster(CHANGED), CreateOnce(secret, "why"))


async def test_an_existing_role_binding_must_belong_to_the_service() -> None:
    binding = CreateOnce(_child() | {"kind": "RoleBinding"}, "why")
    assert await _execute(ScriptedCluster(EXISTS, _listed()), binding) is None
    ref, refusal = await _execute(ScriptedCluster(EXISTS, _listed(labels={}, ownerReferences=[])), binding)
    assert (ref, refusal.reason) == (("RoleBinding", "llm"), "NameTaken")


async def test_an_open_gate_has_its_epoch_in_an_annotation() -> None:
    cluster = ScriptedCluster()
    await _execute(cluster, SetGate("pod-0", "u", "e1", "every router has its KV snapshot"))
    await _execute(cluster, SetGate("pod-0", "u", None, "its engine was restarted"))
    await _execute(cluster, SetGate("pod-0", "u", None, "it is then removed", drains=True))
    opened, *closed = cluster.bodies
    assert opened["metadata"] == {"uid": "u", "annotations": {ADMITTED_EPOCH: "e1"}}
    assert [body["metadata"]["annotations"] for body in closed] == [{ADMITTED_EPOCH: None}] * 2
    written = [body["status"]["conditions"][0] for body in cluster.bodies]
    expected = [("True", "Admitted"), ("False", "Withdrawn"), ("False", "Draining")]
    assert [(row["status"], row["reason"]) for row in written] == expected
    pod = {"metadata": {"name": "pod-0", "uid": "u"}}
    since = [pod_of(pod | {"status": {"conditions": [row]}}).draining_since for row in written]
    assert since == [None, None, written[2]["lastTransitionTime"]]
    assert cluster.calls[0] == ("PATCH", path_of("Pod", "default", "pod-0") + "/status")


async def test_a_notified_pod_has_the_digest_of_its_list_in_an_annotation() -> None:
    cluster = ScriptedCluster()
    await _execute(cluster, NotifyPod("pod-0", "u", "d1", "its list of adapters has changed"))
    assert cluster.bodies == [{"metadata": {"uid": "u", "annotations": {ADAPTER_LIST: "d1"}}}]
    assert cluster.calls == [("PATCH", path_of("Pod", "default", "pod-0") + "/status")]
    assert pod_of({"metadata": cluster.bodies[0]["metadata"] | {"name": "pod-0"}, "status": {}}).adapter_list == "d1"


EVENT = ServiceEvent("Warning", "CrashLoop", "1 of 1: pod-0: exit code 2", "WorkloadReady")


def _raw(version: str = "5") -> dict[str, Any]:
    raw = stored(Case("", {}, name="llm"))
    return raw | {"metadata": raw["metadata"] | {"resourceVersion": version}}


def _event(seen_at: str, **more: Any) -> dict[str, Any]:
    return {"items": [{"metadata": {"name": "e", "namespace": "default", "annotations": {SEEN_AT: seen_at}}} | more]}


async def test_an_event_names_the_service() -> None:
    cluster = ScriptedCluster()
    await EventRecorder(cluster, identity="op-0").record(_raw(), EVENT, seen_at="5")
    (event,) = cluster.bodies
    assert cluster.calls == [("POST", path_of("Event", "default"))]
    assert (event["regarding"]["name"], event["reason"], event["type"]) == ("llm", "CrashLoop", "Warning")
    assert event["note"] == EVENT.note


async def test_an_event_of_the_same_version_is_counted_once() -> None:
    cluster = ScriptedCluster(EXISTS, _event("5"))
    await EventRecorder(cluster, identity="op-1").record(_raw(), EVENT, seen_at="5")
    assert [method for method, _ in cluster.calls] == ["POST", "GET"]


@pytest.mark.parametrize(("series", "count"), [({}, 2), ({"series": {"count": 4}}, 5)], ids=["first", "later"])
async def test_a_repeated_event_is_counted(series: dict[str, Any], count: int) -> None:
    cluster = ScriptedCluster(EXISTS, _event("5", **series))
    await EventRecorder(cluster, identity="op-0").record(_raw("9"), EVENT, seen_at="9")
    assert cluster.calls[-1][0] == "PUT"
    assert cluster.bodies[-1]["series"]["count"] == count
    assert cluster.bodies[-1]["metadata"]["annotations"] == {SEEN_AT: "9"}


async def test_a_refused_event_is_not_an_error() -> None:
    await EventRecorder(ScriptedCluster(FORBIDDEN), identity="op-0").record(_raw(), EVENT, seen_at="5")
    with pytest.raises(ApiError):
        await EventRecorder(ScriptedCluster(ApiError(503, "", "")), identity="op-0").record(_raw(), EVENT, seen_at="5")


async def test_a_long_note_is_cut_to_the_limit_of_the_api() -> None:
    cluster = ScriptedCluster()
    await EventRecorder(cluster, identity="op-0").record(
        _raw(), ServiceEvent("Normal", "x", "ü" * 2000, "y"), seen_at="5"
    )
    assert len(cluster.bodies[0]["note"].encode()) == 1024


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _pod(*conditions: tuple[str, str], **status: Any) -> dict[str, Any]:
    found = [{"type": type_, "status": value} for type_, value in conditions]
    return {"metadata": {"namespace": "default", "uid": "u"}, "status": {"conditions": found} | status}


SCHEDULED = ("PodScheduled", "True")
FAILED = {"reason": "FailedMount", "note": 'secret "keys" not found', "deprecatedLastTimestamp": "2026-01-01T00:00:02Z"}
UNPLACED = {"reason": "FailedScheduling", "note": "later", "deprecatedCount": 9, "eventTime": "2026-01-01T00:00:03Z"}
ONCE = {"items": [FAILED, UNPLACED]}
MOUNT = {"items": [FAILED | {"deprecatedCount": 3}, UNPLACED]}


async def test_events_of_a_long_waiting_pod_are_listed_periodically() -> None:
    clock, cluster = Clock(), ScriptedCluster(MOUNT)
    setup = PodSetupEvents(cluster, clock=clock)
    assert await setup.refresh([_pod(SCHEDULED)]) == FIRST_LOOK_S
    assert (cluster.calls, setup.trouble_of("u")) == ([], "")
    clock.now += FIRST_LOOK_S
    assert await setup.refresh([_pod(SCHEDULED)]) == NEXT_LOOK_S
    assert setup.trouble_of("u") == 'FailedMount: secret "keys" not found'
    assert cluster.calls == [("GET", path_of("Event", "default"))]


@pytest.mark.parametrize(
    ("since", "trouble"),
    [
        ("2026-01-01T00:00:03Z", ""),
        ("2026-01-01T00:00:02Z", 'FailedMount: secret "keys" not found'),
        ("2026-01-01T00:00:02.5Z", 'FailedMount: secret "keys" not found'),
        ("", 'FailedMount: secret "keys" not found'),
    ],
)
async def test_a_failure_before_the_newest_pod_of_a_set_is_over(since: str, trouble: str) -> None:
    clock = Clock()
    setup = PodSetupEvents(ScriptedCluster(MOUNT), clock=clock)
    for _ in range(2):
        assert await setup.refresh([], {("default", "llm-1"): since}) is not None
        clock.now += FIRST_LOOK_S
    assert setup.trouble_of("default/llm-1") == trouble


async def test_a_failure_of_a_normal_start_is_no_trouble_unless_the_pod_waits_for_long() -> None:
    """The kubelet may not know a new Secret at once; its next attempt succeeds."""
    clock = Clock()
    setup = PodSetupEvents(ScriptedCluster(ONCE, {"items": [UNPLACED]}, ONCE), clock=clock)
    await setup.refresh([_pod(SCHEDULED)])
    for wait_s, trouble in (
        (FIRST_LOOK_S, ""),
        (NEXT_LOOK_S, ""),
        (LONG_WAIT_S, 'FailedMount: secret "keys" not found'),
    ):
        clock.now += wait_s
        await setup.refresh([_pod(SCHEDULED)])
        assert setup.trouble_of("u") == trouble


@pytest.mark.parametrize(
    "pod",
    [
        _pod(),
        _pod(("PodScheduled", "False")),
        _pod(SCHEDULED, ("PodReadyToStartContainers", "True")),
        _pod(SCHEDULED, containerStatuses=[{"state": {"running": {}}}]),
        _pod(SCHEDULED, containerStatuses=[{"state": {"waiting": {"reason": "ErrImagePull"}}}]),
    ],
    ids=["not scheduled", "no node", "has a sandbox", "runs", "has an error"],
)
async def test_events_of_other_pods_are_not_listed(pod: dict[str, Any]) -> None:
    assert await PodSetupEvents(ScriptedCluster(), clock=Clock()).refresh([pod]) is None


async def test_a_pod_with_containers_has_no_setup_trouble() -> None:
    clock = Clock()
    setup = PodSetupEvents(ScriptedCluster(MOUNT), clock=clock)
    await setup.refresh([_pod(SCHEDULED)])
    clock.now += FIRST_LOOK_S
    await setup.refresh([_pod(SCHEDULED)])
    await setup.refresh([_pod(SCHEDULED, ("PodReadyToStartContainers", "True"))])
    assert setup.trouble_of("u") == ""


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", "/apis/apps/v1/namespaces/default/deployments/x"),
        ("LeaderWorkerSet", "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets/x"),
    ],
)
async def test_an_object_is_scaled_by_its_kind(kind: str, path: str) -> None:
    metadata = {"name": "x", "namespace": "default", "uid": "u", "labels": {}}
    cluster = ScriptedCluster({"metadata": metadata, "spec": {"replicas": 2}})
    assert await _execute(cluster, SetReplicas(kind, "x", "u", 2, "why")) is None
    assert cluster.calls == [("PATCH", path)]
    assert (cluster.bodies[0]["metadata"]["uid"], cluster.bodies[0]["spec"]) == ("u", {"replicas": 2})


async def test_a_set_whose_webhook_is_away_is_named() -> None:
    """The reconciler tries a refused write again."""
    away = ApiError(500, "InternalError", 'failed calling webhook "vleaderworkerset.kb.io": connection refused')
    ref, refusal = await _execute(ScriptedCluster(away), SetReplicas("LeaderWorkerSet", "x", "u", 2, "why"))
    assert (ref, refusal.reason) == (("LeaderWorkerSet", "x"), "Refused")
