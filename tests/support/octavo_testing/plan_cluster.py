"""`PlanCluster`: an in-memory cluster that carries out plans: objects, the pods of Deployments, and routers.

It simulates the API server as far as a plan can observe it: fields get defaults, pods follow their Deployment, and the
pods of a deleted object end later. The leaders of a LeaderWorkerSet have the ordinals below its replicas, and each of
their workers has the state of its leader. Routers learn late which pods are ready, and send requests to those that they
take to be ready. Tests in tests/cluster show that a real API server accepts the applied objects.
"""

import copy
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from octavo_operator.desired.service_secrets import ServiceSecrets
from octavo_operator.names import APPLIED, DEPLOYMENT, GROUP_SET, REVISION_LABEL
from octavo_operator.observed import EngineDeployment, Observed, Pod, RouterReport
from octavo_operator.plan.actions import Action, Apply, CreateOnce, Delete, NotifyPod, SetGate, SetReplicas
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings
from octavo_operator.timestamps import seconds_since

SECRETS = ServiceSecrets(shared="shared", admin="admin", group="group")
START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class LivePod:
    pod: Pod
    epoch: str = ""

    @property
    def seen(self) -> Pod:
        """The pod with its condition Ready, which the kubelet derives from containers and gate."""
        return replace(self.pod, is_pod_ready=self.pod.is_ready and self.pod.is_admitted)


@dataclass(slots=True)
class LiveRouter:
    """`endpoints`: engine pods that it takes to be ready. `streams`: running requests by engine pod. `is_silent`: it
    has sent no report since its restart."""

    endpoints: set[str] = field(default_factory=set)
    streams: Counter[str] = field(default_factory=Counter)
    is_silent: bool = False


@dataclass(slots=True)
class PlanCluster:
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    engine_deployments: dict[str, EngineDeployment] = field(default_factory=dict)
    engine_manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, LivePod] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    routers: dict[str, LiveRouter] = field(default_factory=dict)
    num_cut: int = 0  # requests on pods that their Deployment has removed
    num_lost: int = 0  # requests that reached a router without a replica
    num_unplaced: int = 0  # pods that found no node when they were created
    room: int = 1000  # number of pods that have a node at once
    broken: set[str] = field(default_factory=set)  # revisions whose engines never become ready
    now_s: int = 0
    drain_s: int = 600
    shares: bool = True  # whether another service's router may be shared
    num_writes: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    _made: int = 0

    def observe(self) -> Observed:
        return copy.deepcopy(
            Observed(
                children=self.objects,
                engine_deployments=tuple(self.engine_deployments.values()),
                engine_manifests=self.engine_manifests,
                pods=tuple(self._with_workers(live.seen) for live in self.pods.values()),
                routers={name: self._report(name, router) for name, router in self.routers.items()},
                router_owner="other" if self.shares else None,
                status=self.status,
            )
        )

    def _with_workers(self, pod: Pod) -> Pod:
        made = (m for m in self.engine_manifests.values() if m["metadata"]["labels"][REVISION_LABEL] == pod.revision)
        sizes = [each["spec"].get("leaderWorkerTemplate", {}).get("size", 1) for each in made]
        names = [f"{pod.name}-{index}" for index in range(1, max(sizes, default=1))]
        return replace(pod, workers=tuple(replace(pod, name=name, uid=name, is_admitted=False) for name in names))

    def execute(self, action: Action) -> None:
        self.num_writes += 1
        match action:
            case Apply(manifest):
                self._apply(copy.deepcopy(dict(manifest)))
            case CreateOnce(manifest) if manifest["kind"] == "RoleBinding":
                self._apply(copy.deepcopy(dict(manifest)))
            case CreateOnce(manifest):
                self.secrets.setdefault(manifest["metadata"]["name"], manifest["stringData"]["secret"])
            case Delete(kind, name, uid, version):
                self._delete(kind, name, uid, version)
            case SetGate(name, uid, epoch, _, drains):
                live = self.pods.get(name)
                if live is not None and live.pod.uid == uid:
                    since = self.now if drains else None
                    live.pod = replace(
                        live.pod, is_admitted=epoch is not None, admitted_epoch=epoch, draining_since=since
                    )
            case NotifyPod(name, uid, digest):
                live = self.pods.get(name)
                if live is not None and live.pod.uid == uid:
                    live.pod = replace(live.pod, adapter_list=digest)
            case SetReplicas(kind, name, uid, replicas):
                self._scale(kind, name, uid, replicas)

    def settle_pods(self, rng: random.Random | None = None) -> None:
        """Create, start and end pods as their Deployments require; with `rng`, each change happens half the time."""
        for deployment in self.engine_deployments.values():
            if deployment.kind == GROUP_SET:
                self._settle_group_set(deployment, rng)
            else:
                self._settle_deployment(deployment, rng)
        self.routers = {name: self.routers.get(name) or LiveRouter() for name in self._router_names()}
        revisions = {s.revision for s in self.engine_deployments.values()}
        for name, live in [*self.pods.items()]:
            if live.pod.revision not in revisions:
                self._remove_pod(live)
            if live.pod.is_terminating and happens(rng):
                self.kill_pod(name)
            elif not live.pod.has_node:
                self._place(live)
            elif not live.pod.is_ready and live.pod.revision not in self.broken and happens(rng):
                self._made += 1
                live.epoch = f"epoch-{self._made}"
                live.pod = replace(live.pod, is_ready=True, stuck_since=None)

    def _settle_deployment(self, deployment: EngineDeployment, rng: random.Random | None) -> None:
        mine = [p for p in self.pods.values() if p.pod.revision == deployment.revision and not p.pod.is_terminating]
        for _ in range(deployment.replicas - len(mine)):
            if happens(rng):
                self._start_pod(f"pod-{self._made + 1}", deployment.revision)
        if rng is not None:
            rng.shuffle(mine)
        mine.sort(key=lambda live: (not live.seen.is_pod_ready, not live.pod.is_ready))
        for live in mine[deployment.replicas :]:
            self._remove_pod(live)

    def _settle_group_set(self, group_set: EngineDeployment, rng: random.Random | None) -> None:
        """A pod of an ordinal is only created when the earlier one has gone, as they have the same name."""
        mine = {p.pod.ordinal: p for p in self.pods.values() if p.pod.revision == group_set.revision}
        for ordinal in range(group_set.replicas):
            if ordinal not in mine and happens(rng):
                self._start_pod(f"{group_set.name}-{ordinal}", group_set.revision, ordinal)
        for ordinal, live in mine.items():
            if ordinal >= group_set.replicas:
                self._remove_pod(live)

    @property
    def now(self) -> str:
        return (START + timedelta(seconds=self.now_s)).isoformat().replace("+00:00", "Z")

    def deliver_endpoints(self, rng: random.Random | None = None) -> None:
        """Deliver to routers which pods are ready; with `rng`, each change half the time. A watch keeps the order: pods
        that have become ready come before those that became unready for them."""
        pods = {name: live for name, live in self.pods.items() if not live.pod.is_terminating}
        ready = {name for name, live in pods.items() if live.seen.is_pod_ready}
        for router in self.routers.values():
            router.endpoints |= {name for name in sorted(ready - router.endpoints) if happens(rng)}
            if ready <= router.endpoints:
                router.endpoints -= {name for name in sorted(router.endpoints - ready) if happens(rng)}

    def serve(self, rng: random.Random) -> None:
        """Let requests end and begin, for ten seconds."""
        self.now_s += 10
        for router in self.routers.values():
            router.streams = Counter({pod: n for pod, n in router.streams.items() if pod in self.pods and happens(rng)})
            router.streams.update({pod: rng.randint(0, 2) for pod in sorted(router.endpoints & self.pods.keys())})
            self.num_lost += not router.endpoints

    def restart_router(self, name: str) -> None:
        """Let the router send no report until `deliver_router_reports`."""
        if name in self.routers:
            self.routers[name].is_silent = True

    def deliver_router_reports(self, rng: random.Random | None = None) -> None:
        for router in self.routers.values():
            router.is_silent = router.is_silent and not happens(rng)

    def restart_engine(self, name: str) -> None:
        self.pods[name].pod = replace(self.pods[name].pod, is_ready=False, stuck_since=self.now)

    def kill_pod(self, name: str) -> None:
        del self.pods[name]
        for router in self.routers.values():
            del router.streams[name]

    def _remove_pod(self, live: LivePod) -> None:
        """Let a pod end because its Deployment does not need it any more."""
        since = live.pod.draining_since
        is_late = since is not None and seconds_since(since, self.now) >= self.drain_s
        if not live.pod.is_terminating and live.pod.is_ready and not is_late:
            self.num_cut += sum(router.streams[live.pod.name] for router in self.routers.values())
        live.pod = replace(live.pod, is_terminating=True)

    def edit(self, ref: tuple[str, str], rng: random.Random) -> None:
        """Change or delete a child, as a user might."""
        if rng.random() < 0.5:
            del self.objects[ref]
        else:
            self._made += 1
            self.objects[ref]["metadata"] |= {"labels": {"changed": "by hand"}, "resourceVersion": str(self._made)}

    @property
    def num_serving(self) -> int:
        return sum(live.seen.serves for live in self.pods.values())

    @property
    def num_held(self) -> int:
        """Number of pods that exist or that Deployments are about to create."""
        living = Counter(live.pod.revision for live in self.pods.values() if not live.pod.is_terminating)
        missing = (max(0, each.replicas - living[each.revision]) for each in self.engine_deployments.values())
        return len(self.pods) + sum(missing)

    def num_staying(self) -> int:
        """Count the serving pods whose Deployment still exists. An engine that restarted behind its open gate does not
        serve: the routers must follow the new process first."""
        revisions = {s.revision for s in self.engine_deployments.values()}
        serving = [live for live in self.pods.values() if live.seen.serves and live.pod.admitted_epoch == live.epoch]
        return sum(live.pod.revision in revisions for live in serving)

    def _router_names(self) -> tuple[str, ...]:
        own = ("Deployment", "llm-router") in self.objects
        return ("router-0", "router-1") if own else ("other-router",) if self.shares else ()

    def _report(self, name: str, router: LiveRouter) -> RouterReport | None:
        if router.is_silent:
            return None
        ready = {name: live.epoch for name, live in self.pods.items() if live.pod.is_ready}
        in_flight, sends_to = dict(router.streams), frozenset(router.endpoints)
        return RouterReport(pod=name, admitted=ready, sends_to=sends_to, in_flight=in_flight)

    def _apply(self, manifest: dict[str, Any]) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._made += 1
        revision = manifest["metadata"]["labels"].get(REVISION_LABEL)
        if kind in (DEPLOYMENT, GROUP_SET) and revision is not None:
            before = self.engine_deployments.get(name)
            made = EngineDeployment(
                name=name, uid=f"uid-{self._made}", kind=kind, revision=revision, replicas=0, created=f"{self._made:06}"
            )
            version = str(self._made)
            self.engine_deployments[name] = replace(
                before or made, replicas=manifest["spec"]["replicas"], version=version
            )
            self.engine_manifests[name] = _defaulted(manifest)
            return
        before_uid = self.objects.get((kind, name), {}).get("metadata", {}).get("uid")
        manifest["metadata"]["uid"] = before_uid or f"uid-{self._made}"
        manifest["metadata"]["resourceVersion"] = str(self._made)
        self.objects[kind, name] = _defaulted(manifest)

    def _scale(self, kind: str, name: str, uid: str, replicas: int) -> None:
        found = self.engine_deployments.get(name)
        if found is not None and (found.kind, found.uid) == (kind, uid):
            self._made += 1
            self.engine_deployments[name] = replace(found, replicas=replicas, version=str(self._made))
            self.engine_manifests[name]["spec"]["replicas"] = replicas
            self.engine_manifests[name]["metadata"]["annotations"][APPLIED] = f"replicas-{replicas}"

    def _delete(self, kind: str, name: str, uid: str, version: str) -> None:
        if (found := self.engine_deployments.get(name)) is not None:
            if (found.kind, found.uid, found.version) == (kind, uid, version):
                del self.engine_deployments[name], self.engine_manifests[name]
            return
        metadata = self.objects.get((kind, name), {}).get("metadata", {})
        if (metadata.get("uid"), metadata.get("resourceVersion")) == (uid, version):
            del self.objects[kind, name]

    def _start_pod(self, name: str, revision: str, ordinal: int = 0) -> None:
        self._made += 1
        for router in self.routers.values():  # an earlier pod of the name had another address
            router.endpoints.discard(name)
        waits = {"trouble": "Unschedulable", "waits_since": self.now}
        pod = Pod(name=name, uid=f"uid-{self._made}", revision=revision, ordinal=ordinal, **waits)
        self.pods[name] = LivePod(pod)
        self._place(self.pods[name])
        self.num_unplaced += not self.pods[name].pod.has_node

    def _place(self, live: LivePod) -> None:
        if sum(each.pod.has_node for each in self.pods.values()) < self.room:
            live.pod = replace(live.pod, has_node=True, trouble=None, waits_since=None, stuck_since=self.now)


def happens(rng: random.Random | None) -> bool:
    return rng is None or rng.random() < 0.5


def _defaulted(manifest: dict[str, Any]) -> dict[str, Any]:
    manifest["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
    if isinstance(manifest.get("spec"), dict):
        manifest["spec"].setdefault("defaulted", True)
    manifest["status"] = {}
    return manifest


def settle(cluster: PlanCluster, service: InferenceService, settings: Settings) -> None:
    """Run the operator until it has nothing to do."""
    for _ in range(20):
        planned = plan(service, cluster.observe(), settings, now=cluster.now, new_secrets=SECRETS)
        cluster.status = planned.status
        if not planned.actions and planned.again_s is None:
            return
        for action in planned.actions:
            cluster.execute(action)
        cluster.settle_pods()
        cluster.deliver_endpoints()
    raise AssertionError(f"still to do: {planned.actions}")
