"""A reconciliation of a service whose objects the API server refuses, or whose spec is not accepted."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from octavo_operator import optional_apis
from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.cluster.inventory import Inventory
from octavo_operator.cluster.pod_events import FIRST_LOOK_S, MIN_OCCURRENCES, PodSetupEvents
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reconciler import Incomplete, Reconciler
from octavo_operator.cluster.view import Key, View
from octavo_operator.desired.engine import engine_revision
from octavo_operator.metrics import Telemetry
from octavo_operator.names import ADMITTED_GATE, COMPONENT_LABEL, GROUP_SET, REVISION_LABEL, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.observed import RouterReport
from octavo_operator.optional_apis import OptionalApis
from octavo_operator.service import Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
KEY: Key = ("default", "llm")
UNTYPED = ApiError(
    500,
    "",
    "failed to create typed patch object (default/llm-engine; apps/v1, Kind=Deployment): "
    ".spec.template.spec.affinity.nodeAffinty: field not declared in schema",
)
UNCONVERTED = ApiError(
    500,
    "",
    "failed to convert new object (default/llm-engine; apps/v1, Kind=Deployment) to proper version: unable to convert "
    "unstructured object to apps/v1, Kind=Deployment: cannot convert float64 to int64",
)
LEADER_CHANGED = ApiError(500, "InternalError", "etcdserver: leader changed")
Fault = Callable[[str, str], ApiError | None]


class RecordingCluster(Cluster):
    """Accepts every write for which `fault`, called with method and path, returns no error."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.written: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, dict[str, Any]] = {}
        self.webhook: Callable[[str], str] = lambda manifest: manifest
        self._version = 100

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> dict[str, Any]:
        if (error := self._fault(method, path)) is not None:
            raise error
        if "/events" not in path:
            self.written[path] = dict(body or {})
        self._version += 1
        stored = self.stored.get(path.rpartition("/")[2], {"metadata": {"uid": path}})
        sent = {"creationTimestamp": "2026-01-01T00:00:00Z"} | (body or {}).get("metadata", {})
        changed = stored["metadata"] | sent | {"resourceVersion": str(self._version)}
        answer: dict[str, Any] = json.loads(self.webhook(json.dumps({**stored, **(body or {}), "metadata": changed})))
        return answer


class Leader:
    may_write, identity = True, "operator-0"


class Reports:
    def for_pods(self, namespace: str, pods: Any) -> dict[str, RouterReport]:
        return {pod: RouterReport(pod=pod, admitted={"llm-engine-0": "e1"}) for pod in pods}


class Operator:
    """A reconciler over a view with one service, a router that serves, and an engine pod that was not admitted yet."""

    def __init__(
        self,
        raw: dict[str, Any],
        fault: Fault = lambda *_: None,
        revision: str = "old",
        settings: Settings = SETTINGS,
    ) -> None:
        self.view, self.cluster = View(), RecordingCluster(fault)
        fakes: dict[str, Any] = {"leadership": Leader(), "reports": Reports()}
        self._reconciler = Reconciler(
            self.cluster,
            self.view,
            settings=lambda: settings,
            queue=WorkQueue[Key](),
            secrets_of=lambda _: SECRETS,
            scaling=lambda key: None,
            telemetry=Telemetry(),
            **fakes,
        )
        self.view.update(raw)
        self.cluster.stored["status"] = raw  # the last part of the path to which the status is written
        ready = [{"type": type_, "status": "True"} for type_ in ("Ready", "ContainersReady", "PodScheduled")]
        self.view.update(_pod("llm-router-0", "router", conditions=ready))
        self.view.update(_pod("llm-engine-0", "engine", revision, conditions=ready[1:]))

    def use_events(self, events: PodSetupEvents) -> None:
        self._reconciler._pod_events = events

    async def reconcile(self) -> None:
        await self._reconciler.reconcile(KEY)

    @property
    def admitted(self) -> list[str]:
        paths = [path for path in self.cluster.written if "/pods/" in path]
        return [path.split("/")[-2] for path in paths if ADMITTED_GATE in str(self.cluster.written[path])]

    @property
    def status(self) -> dict[str, Any]:
        (found,) = (body for path, body in self.cluster.written.items() if "inferenceservices" in path)
        return dict(found["status"])

    def condition(self, type_: str) -> dict[str, Any]:
        return next(c for c in self.status["conditions"] if c["type"] == type_)


class Events(Cluster):
    """A cluster that has Warnings about objects, by the uid of a pod or the name of a StatefulSet."""

    def __init__(self, warnings: Mapping[str, list[dict[str, Any]]]) -> None:
        self._warnings = warnings

    async def list_warnings(self, namespace: str, **regarding: str) -> list[dict[str, Any]]:
        assert {*regarding} in ({"uid"}, {"kind", "name"})
        return self._warnings.get(regarding.get("uid") or regarding["name"], [])


class Crds:
    """A cluster that serves the kinds in `served`."""

    def __init__(self) -> None:
        self.served: set[str] = {"PodMonitor"}

    async def list_uids(self, kind: str, namespace: str | None, *, label: str = "") -> set[str]:
        if kind not in self.served:
            raise ApiError(404, "", "404 page not found")
        return set()


def _raw(name: str = "llm", **spec: Any) -> dict[str, Any]:
    raw = stored(Case("", spec, name=name))
    raw["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z"}
    return raw


def _pod(name: str, component: str, revision: str = "old", **status: Any) -> dict[str, Any]:
    labels = {SERVICE_LABEL: "llm", ROUTER_LABEL: "llm", COMPONENT_LABEL: component, REVISION_LABEL: revision}
    metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


def _engine_fault(error: ApiError) -> Fault:
    """Fail writes of the wanted revision."""
    return lambda _, path: error if "/deployments/llm-engine-" in path and not path.endswith("-old") else None


@pytest.mark.parametrize(
    ("error", "reason"),
    [(UNTYPED, "Refused"), (UNCONVERTED, "Refused"), (LEADER_CHANGED, "Retrying")],
    ids=["untyped", "unconverted", "leader changed"],
)
async def test_an_object_that_is_not_written_stops_no_other_write(error: ApiError, reason: str) -> None:
    operator = Operator(_raw(), _engine_fault(error), revision=engine_revision(read_service(_raw()), SETTINGS))
    with pytest.raises(Incomplete):
        await operator.reconcile()
    assert any("deployments/llm-router" in path for path in operator.cluster.written)
    assert operator.admitted == ["llm-engine-0"]
    found = operator.condition("ChildrenApplied")
    assert found["reason"] == reason
    assert error.message in found["message"]
    assert operator.condition("Ready")["status"] == "False"


IN_PODS = {"parallelism": {"tensor": 2, "nodes": 2}}


async def test_a_worker_without_its_secret_is_named_and_gets_it() -> None:
    """The kubelet reports only in Events that a volume's Secret is missing."""
    raw, settings = _raw(**IN_PODS), replace(SETTINGS, has_group_sets=True)
    revision = engine_revision(read_service(raw), settings)
    operator = Operator(raw, revision=revision, settings=settings)
    await operator.reconcile()
    starting = [{"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    status = {"conditions": [{"type": "PodScheduled", "status": "True"}], "containerStatuses": starting}
    for name, component in (("llm-engine-0", "engine"), ("llm-engine-0-1", "engine-worker")):
        operator.view.update(_pod(name, component, revision, **status))
    clock, note = [0.0], 'FailedMount: secret "llm-group-secret" not found'
    warning = {"reason": "FailedMount", "note": note.partition(": ")[2], "deprecatedCount": MIN_OCCURRENCES}
    events = Events({"uid-llm-engine-0-1": [warning]})
    operator.use_events(PodSetupEvents(events, clock=lambda: clock[0]))
    operator.cluster.written.clear()
    for clock[0] in (1.0, 1.0 + FIRST_LOOK_S):
        await operator.reconcile()
    found = operator.condition("WorkloadReady")
    assert (found["reason"], f"llm-engine-0-1: {note}" in found["message"]) == ("MountFailed", True)
    made = [body["metadata"]["name"] for path, body in operator.cluster.written.items() if path.endswith("/secrets")]
    assert made == ["llm-group-secret"]


REFUSED = {
    "QuotaExceeded": 'create Pod x in StatefulSet x failed error: pods "x" is forbidden: exceeded quota: none',
    "PodRefused": 'create Pod x in StatefulSet x failed error: pods "x" is forbidden: violates PodSecurity',
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize(("lacks", "missing"), [("", 4), ("-0", 1)], ids=["leaders", "workers"])
async def test_a_set_whose_pods_are_refused_is_named_until_it_has_them(reason: str, lacks: str, missing: int) -> None:
    """Sets have no condition for it. `lacks`: end of the name of the StatefulSet without all of its pods."""
    raw, settings = _raw(**IN_PODS, replicas=2), replace(SETTINGS, has_group_sets=True)
    revision = engine_revision(read_service(raw), settings)
    operator, name = Operator(raw, revision="none", settings=settings), f"llm-{revision}"
    clock = [0.0]
    warning = {"reason": "FailedCreate", "note": REFUSED[reason], "deprecatedCount": MIN_OCCURRENCES}
    operator.use_events(PodSetupEvents(Events({f"{name}{lacks}": [warning]}), clock=lambda: clock[0]))

    def add(*ends: str) -> None:
        for end in ends:
            pod = _pod(name + end, "engine" if end.count("-") == 1 else "engine-worker", revision)
            pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"] = end[1]
            operator.view.update(pod)

    await operator.reconcile()  # creates the set
    add(*(("-0", "-1", "-1-1") if lacks else ()))
    reasons = []
    for clock[0] in (1.0, 1.0 + FIRST_LOOK_S):
        await operator.reconcile()
        reasons.append(operator.condition("WorkloadReady")["reason"])
    assert reasons == ["Starting", reason]
    message = operator.condition("WorkloadReady")["message"]
    assert message.startswith(f"{missing} of 4 pods can't be created: FailedCreate: {REFUSED[reason]}")
    warning["deprecatedLastTimestamp"] = "2025-12-31T23:59:59Z"  # before its set, which then is another of its name
    operator.use_events(PodSetupEvents(Events({f"{name}{lacks}": [warning]}), clock=lambda: clock[0]))
    for clock[0] in (9.0, 9.0 + FIRST_LOOK_S):
        await operator.reconcile()
    assert operator.condition("WorkloadReady")["reason"] == "Starting"
    add("-0", "-0-1", "-1", "-1-1")
    await operator.reconcile()
    assert operator.condition("WorkloadReady")["reason"] == "Starting"


def _deployment(revision: str, replicas: int) -> dict[str, Any]:
    labels = {SERVICE_LABEL: "llm", COMPONENT_LABEL: "engine", REVISION_LABEL: revision}
    owner = {"apiVersion": "serving.octavo.dev/v1alpha1", "kind": "InferenceService", "name": "llm", "controller": True}
    metadata = {"namespace": "default", "name": f"llm-engine-{revision}", "uid": "d", "labels": labels}
    metadata |= {"ownerReferences": [owner], "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "2"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"replicas": replicas}}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"shiny": True}, "InvalidSpec"),
        ({"exposure": {"gateway": {"parentRefs": [{"name": "gw"}]}}, "auth": {"required": False}}, "NoGatewayApi"),
    ],
    ids=["unreadable", "no Gateway API"],
)
async def test_pods_are_scaled_and_admitted_while_the_spec_is_not_accepted(spec: dict[str, Any], reason: str) -> None:
    operator = Operator(_raw(**spec, replicas=3))
    running = operator.cluster.stored["llm-engine-old"] = _deployment("old", 1)
    operator.view.update(running)
    await operator.reconcile()
    (scaled,) = (body for path, body in operator.cluster.written.items() if path.endswith("/llm-engine-old"))
    assert (scaled["spec"], scaled["metadata"]["uid"]) == ({"replicas": 3}, "d")
    assert operator.admitted == ["llm-engine-0"]
    assert operator.condition("Accepted")["reason"] == reason
    assert operator.status["replicas"]["desired"] == 3
    assert operator.view.services_behind_router_of(("default", "llm-router-0")) == {KEY}
    assert len(operator.cluster.written) == 3  # replicas, gate, status
    operator.cluster.written.clear()
    await operator.reconcile()
    assert "llm-engine-old" not in str(operator.cluster.written.keys())


async def test_the_revision_that_serves_is_scaled_while_the_wanted_one_is_refused() -> None:
    operator = Operator(_raw(), _engine_fault(UNTYPED))
    running = operator.cluster.stored["llm-engine-old"] = _deployment("old", 1)
    operator.view.update(running)
    conditions = [{"type": type_, "status": "True"} for type_ in ("ContainersReady", "Ready", ADMITTED_GATE)]
    operator.view.update(_pod("llm-engine-0", "engine", conditions=conditions))
    for replicas, expected in ((1, 0), (3, 1), (3, 1)):
        operator.view.update(_raw(replicas=replicas) | {"status": operator.view.services[KEY].get("status")})
        with pytest.raises(Incomplete):
            await operator.reconcile()
        scaled = [body for path, body in operator.cluster.written.items() if path.endswith("/llm-engine-old")]
        assert [body["spec"] for body in scaled] == [{"replicas": 3}] * expected


async def test_a_kind_whose_crd_comes_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_apis, "ASK_EVERY_S", 0.0)
    crds: Any = Crds()
    apis = OptionalApis(crds, replace(SETTINGS, has_gateway_api=True, has_pod_monitors=True), ())
    await apis.ask()
    assert (apis.settings.has_gateway_api, apis.settings.has_pod_monitors) == (False, True)
    found = list[str]()
    crds.served.add("HTTPRoute")
    await _ask_until(apis, found, 1)
    assert (found, apis.settings.has_gateway_api) == (["HTTPRoute"], True)


async def _ask_until(apis: OptionalApis, found: list[str], count: int) -> None:
    """Let `apis` ask until so many kinds are found."""
    asking = asyncio.create_task(apis.ask_until_cancelled(found.append))
    async with asyncio.timeout(10):
        while len(found) < count:
            await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_kind_whose_crd_goes_is_not_used_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other services are reconciled meanwhile. The sets have gone with their CRD."""
    monkeypatch.setattr(optional_apis, "ASK_EVERY_S", 0.0)
    crds, view, removed, found = Crds(), View(), list[str](), list[str]()
    crds.served = {"InferenceService", GROUP_SET}
    cluster: Any = crds
    apis = OptionalApis(cluster, replace(SETTINGS, has_group_sets=True), ())
    await apis.ask()
    inventory = Inventory(
        cluster,
        view,
        kinds=["InferenceService", GROUP_SET],
        namespaces=(),
        remove=lambda raw: removed.append(raw["kind"]),
        mark_missing=apis.mark_missing,
    )
    view.update(_deployment("old", 1) | {"kind": GROUP_SET})
    crds.served.remove(GROUP_SET)
    for _ in range(2):
        assert await inventory.find_missing() == set()
    assert (apis.settings.has_group_sets, removed) == (False, [GROUP_SET] * 2)
    crds.served.add(GROUP_SET)
    await _ask_until(apis, found, 1)
    assert (found, apis.settings.has_group_sets) == ([GROUP_SET], True)
    crds.served.clear()
    with pytest.raises(ApiError, match="install the CRD again"):
        await inventory.find_missing()


async def test_an_object_that_a_webhook_changes_is_written_once() -> None:
    operator = Operator(_raw(resources={"limits": {"memory": "1Gi"}}))
    operator.cluster.webhook = lambda manifest: manifest.replace('"image": "', '"image": "mirror.example.com/')
    await operator.reconcile()
    deployments = [raw for raw in operator.view.objects() if raw["kind"] == "Deployment"]
    assert all("mirror.example.com" in str(raw) for raw in deployments)
    operator.cluster.written.clear()
    await operator.reconcile()
    assert [path for path in operator.cluster.written if "/deployments/" in path] == []
    changed = json.loads(json.dumps(deployments[0]).replace("mirror.example.com", "elsewhere.example.com"))
    changed["metadata"]["resourceVersion"] = "9999"
    operator.view.update(changed)
    await operator.reconcile()
    assert [path.rpartition("/")[2] for path in operator.cluster.written if "/deployments/" in path] == [
        changed["metadata"]["name"]
    ]
