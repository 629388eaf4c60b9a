"""A real reconciler driven by hand against a real API server, with simulated nodes and injected faults.

`SimulatedNodes` stands in for controllers and kubelets: it creates the pods of each Deployment, marks them ready as
their gates say, removes unready ones first, and reports every engine pod as admitted by the router.
`SimulatedOperator` runs the real reconciler over the real client; a test calls its `watch` where watches would deliver
events. Its `fault` may fail any write, before or after the request is sent, by a kill or by an API error.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from octavo_operator.cluster.client import KINDS, Cluster, Raw, path_of
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reconciler import Incomplete, Reconciler
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.desired.service_secrets import ServiceSecrets
from octavo_operator.metrics import Telemetry
from octavo_operator.names import (
    ADMITTED_GATE,
    COMPONENT_LABEL,
    ENGINE,
    REVISION_LABEL,
    ROUTER,
    ROUTER_LABEL,
    SERVICE_LABEL,
)
from octavo_operator.observed import Load, RouterReport
from octavo_operator.service import Settings
from octavo_operator.spec.service import GROUP, KIND

from octavo_testing.control_plane import ControlPlane

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
CHILDREN = (
    "Deployment",
    "Service",
    "ServiceAccount",
    "ConfigMap",
    "HorizontalPodAutoscaler",
    "PersistentVolumeClaim",
    "Ingress",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "RoleBinding",
)
WATCHED = (KIND, "Pod", *CHILDREN)
ROUNDS = 20
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"

#: Maps the number of a write, from 1, to an exception and whether it is raised after the write is sent. None: no fault.
Fault = Callable[[int], tuple[BaseException, bool] | None]


class Killed(BaseException):
    """Stands for the end of the process at this point."""


def no_fault(_: int) -> None:
    return None


class FaultyCluster(Cluster):
    """A client that injects faults. Writes that the API server refuses aren't counted."""

    def __init__(self, api: ApiClient, fault: Fault) -> None:
        super().__init__(api)
        self._fault = fault
        self.num_writes = 0

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> Raw:
        if method == "GET" or "/leases" in path:
            return await super()._call(method, path, body, **how)
        fault = self._fault(self.num_writes + 1)
        if fault is None or fault[1]:
            answer = await super()._call(method, path, body, **how)
        self.num_writes += 1
        if fault is not None:
            raise fault[0]
        return answer


class SimulatedNodes(RouterReports):
    """Simulates controllers and kubelets, and a router that reports every running engine pod as admitted."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._namespace = namespace
        self._made = 0
        self.num_running = 0  # requests that routers report

    def for_pods(self, namespace: str, pods: Any) -> dict[str, RouterReport]:
        engines = [pod for pod in self._list("Pod") if _component(pod) == ENGINE]
        admitted = {
            pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in engines if pod["status"].get("conditions")
        }
        loads = {name: Load(running=self.num_running) for name in sorted(admitted)[:1]}
        ready = frozenset(pod["metadata"]["name"] for pod in engines if _statuses(pod).get("Ready") == "True")
        return {name: RouterReport(pod=name, admitted=admitted, sends_to=ready, loads=loads) for name in pods}

    def settle(self) -> bool:
        """Create and delete pods as the Deployments require; return whether anything changed."""
        wanted = {d["metadata"]["name"]: d for d in self._list("Deployment")}
        pods = self._list("Pod")
        pods.sort(key=lambda pod: _statuses(pod).get("Ready") != "True")
        owners = {name: [p for p in pods if p["metadata"]["labels"]["made-for"] == name] for name in wanted}
        extra = [p for p in pods if p["metadata"]["labels"]["made-for"] not in wanted]
        missing = 0
        for name, deployment in wanted.items():
            replicas = deployment["spec"]["replicas"]
            extra += owners[name][replicas:]
            missing += max(0, replicas - len(owners[name]))
            for _ in range(replicas - len(owners[name])):
                self._start(name, deployment)
        for pod in extra:
            path = path_of("Pod", self._namespace, pod["metadata"]["name"])
            self._plane.call("DELETE", path, {"gracePeriodSeconds": 0})
        turned = [pod for pod in pods if pod not in extra and _gate(pod) not in (None, _statuses(pod).get("Ready"))]
        for pod in turned:
            self._set_conditions(pod["metadata"]["name"], [{"type": "Ready", "status": _gate(pod)}])
        return bool(extra or missing or turned)

    def _start(self, name: str, deployment: Raw) -> None:
        self._made += 1
        template = deployment["spec"]["template"]["metadata"]["labels"]
        kept = (SERVICE_LABEL, ROUTER_LABEL, REVISION_LABEL, COMPONENT_LABEL)
        labels = {label: template[label] for label in kept if label in template} | {"made-for": name}
        pod = {
            "metadata": {"name": f"{name}-{self._made}", "labels": labels},
            "spec": {"containers": [{"name": "main", "image": "x"}]},
        }
        self._plane.call("POST", path_of("Pod", self._namespace), pod)
        ready = [{"type": type_, "status": "True"} for type_ in ("ContainersReady", "PodScheduled")]
        if _component(pod) == ROUTER:
            ready.append({"type": "Ready", "status": "True"})
        self._set_conditions(pod["metadata"]["name"], ready)

    def _set_conditions(self, pod: str, conditions: list[Raw]) -> None:
        path = path_of("Pod", self._namespace, pod) + "/status"
        self._plane.call("PATCH", path, {"status": {"phase": "Running", "conditions": conditions}}, kind=STRATEGIC)

    def _list(self, kind: str) -> list[Raw]:
        found: list[Raw] = self._plane.call("GET", path_of(kind, self._namespace))["items"]
        return found


def _statuses(pod: Raw) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in pod["status"].get("conditions", ())}


def _gate(pod: Raw) -> str | None:
    return _statuses(pod).get(ADMITTED_GATE)


class SimulatedOperator:
    """One operator process. A later one starts with an empty view."""

    def __init__(self, api: ApiClient, namespace: str, nodes: SimulatedNodes, *, fault: Fault = no_fault) -> None:
        self.cluster = FaultyCluster(api, fault)
        self.view = View()
        self.now_s = 1000.0
        self._namespace = namespace
        self._known: dict[tuple[str, str], Raw] = {}
        self._leadership = Leadership(self.cluster, namespace=namespace, name="operator", identity="op")
        self._queue = WorkQueue[Key]()
        self._reconciler = Reconciler(
            self.cluster,
            self.view,
            settings=lambda: SETTINGS,
            leadership=self._leadership,
            reports=nodes,
            queue=self._queue,
            secrets_of=lambda router: ServiceSecrets(
                f"shared by {router[1]}", f"admin of {router[1]}", f"group of {router[1]}"
            ),
            clock=lambda: self.now_s,
            scaling=lambda key: None,
            telemetry=Telemetry(),
        )

    async def watch(self, kinds: Iterable[str] = WATCHED) -> None:
        """Deliver the events of these kinds since the last call; events of other kinds stay undelivered."""
        await self._leadership.try_once()
        found = {ref: raw for ref, raw in self._known.items() if ref[0] not in kinds}
        for kind in kinds:
            listed = await self.cluster._call("GET", path_of(kind, self._namespace))
            for item in listed["items"]:
                if kind == KIND or SERVICE_LABEL in item["metadata"].get("labels", {}):
                    found[kind, item["metadata"]["name"]] = item | {"kind": kind, "apiVersion": listed["apiVersion"]}
        for ref, raw in self._known.items():
            if ref not in found or found[ref]["metadata"]["uid"] != raw["metadata"]["uid"]:
                self.view.update(raw, is_gone=True)
        for raw in found.values():
            self.view.update(raw)
        self._known = found

    async def reconcile(self) -> None:
        for key in list(self.view.services):
            await self._reconciler.reconcile(key)

    async def settle(self, nodes: SimulatedNodes) -> None:
        """Reconcile until operator and nodes have no work left. Exceptions of faults pass, except `Incomplete`."""
        for _ in range(ROUNDS):
            await self.watch()
            before = self.cluster.num_writes
            with suppress(Incomplete):
                await self.reconcile()
            if not nodes.settle() and self.cluster.num_writes == before:
                return
        raise AssertionError(f"still at work after {ROUNDS} rounds")


@asynccontextmanager
async def connected(plane: ControlPlane) -> AsyncIterator[ApiClient]:
    found = Configuration()
    await config.load_kube_config(config_file=str(plane.kubeconfig()), client_configuration=found)  # type: ignore[no-untyped-call]
    async with ApiClient(found) as api:
        yield api


def namespace_state(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    """Return the state of a namespace without its name, ids, times and the names of pods."""
    found: dict[str, Any] = {}
    for kind in CHILDREN:
        for item in plane.call("GET", path_of(kind, namespace))["items"]:
            metadata = item["metadata"]
            kept = {k: v for k, v in item.items() if k not in ("metadata", "status")}
            kept |= {"labels": metadata.get("labels"), "owners": len(metadata.get("ownerReferences", ()))}
            kept["annotations"] = sorted(metadata.get("annotations", {}))
            for assigned in ("clusterIP", "clusterIPs"):
                kept.get("spec", {}).pop(assigned, None)
            found[f"{kind}/{metadata['name']}"] = kept
    pods = plane.call("GET", path_of("Pod", namespace))["items"]
    found["pods"] = sorted(f"{pod['metadata']['labels']['made-for']}: {_conditions(pod)}" for pod in pods)
    for item in plane.call("GET", path_of(KIND, namespace))["items"]:
        status = item["status"]
        found[f"status of {item['metadata']['name']}"] = {
            "conditions": _conditions(item),
            **{name: status[name] for name in ("replicas", "revision", "url", "observedGeneration")},
        }
    text: dict[str, Any] = json.loads(json.dumps(found).replace(namespace, "NAMESPACE"))
    return text


def event_counts(plane: ControlPlane, namespace: str) -> Counter[str]:
    """Count the operator's Events by reason. Events of the API server are left out."""
    found = Counter[str]()
    items = plane.call("GET", path_of("Event", namespace))["items"]
    for event in (item for item in items if item.get("reportingController", "").startswith(GROUP)):
        found[event["reason"]] += (event.get("series") or {"count": 1})["count"]
    return found


def _conditions(item: Raw) -> list[str]:
    return sorted(f"{c['type']}={c['status']} {c.get('reason', '')}" for c in item["status"]["conditions"])


def _component(pod: Raw) -> str:
    return str(pod["metadata"]["labels"].get(COMPONENT_LABEL, ""))


assert set(WATCHED) <= set(KINDS)
