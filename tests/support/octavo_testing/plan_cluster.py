"""`PlanCluster`: an in-memory cluster that carries out plans: objects, the pods of Deployments, and routers.

It simulates the API server as far as a plan can observe it: fields get defaults, pods follow their Deployment, and the
pods of a deleted object end later. Tests in tests/cluster show that a real API server accepts the applied objects.
"""

import copy
import random
from dataclasses import dataclass, field, replace
from typing import Any

from octavo_operator.names import APPLIED, REVISION_LABEL
from octavo_operator.observed import EngineDeployment, Observed, Pod, RouterReport
from octavo_operator.plan.actions import Action, Apply, CreateOnce, Delete, SetGate, SetReplicas


@dataclass(slots=True)
class LivePod:
    pod: Pod
    epoch: str = ""

    @property
    def seen(self) -> Pod:
        """The pod with its condition Ready, which the kubelet derives from containers and gate."""
        return replace(self.pod, is_pod_ready=self.pod.is_ready and self.pod.is_admitted)


@dataclass(slots=True)
class PlanCluster:
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    engine_deployments: dict[str, EngineDeployment] = field(default_factory=dict)
    engine_manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, LivePod] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # routers that have sent no report since their restart
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
                pods=tuple(live.seen for live in self.pods.values()),
                routers={name: None if name in self.silent else self._report(name) for name in self._routers()},
                router_owner="other" if self.shares else None,
                status=self.status,
            )
        )

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
            case SetGate(name, uid, epoch):
                live = self.pods.get(name)
                if live is not None and live.pod.uid == uid:
                    live.pod = replace(live.pod, is_admitted=epoch is not None, admitted_epoch=epoch)
            case SetReplicas(name, uid, replicas):
                self._scale(name, uid, replicas)

    def settle_pods(self, rng: random.Random | None = None) -> None:
        """Create, start and end pods as their Deployments require; with `rng`, each change happens half the time."""
        for deployment in self.engine_deployments.values():
            mine = [p for p in self.pods.values() if p.pod.revision == deployment.revision and not p.pod.is_terminating]
            for _ in range(deployment.replicas - len(mine)):
                if _happens(rng):
                    self._start_pod(deployment.revision)
            mine.sort(key=lambda live: not live.seen.serves)
            for live in mine[deployment.replicas :]:
                live.pod = replace(live.pod, is_terminating=True)
        revisions = {s.revision for s in self.engine_deployments.values()}
        for name, live in [*self.pods.items()]:
            if live.pod.revision not in revisions:
                live.pod = replace(live.pod, is_terminating=True)
            if live.pod.is_terminating and _happens(rng):
                del self.pods[name]
            elif not live.pod.is_ready and _happens(rng):
                self._made += 1
                live.epoch = f"epoch-{self._made}"
                live.pod = replace(live.pod, is_ready=True)

    def restart_router(self, name: str) -> None:
        """Let the router send no report until `deliver_router_reports`."""
        self.silent.add(name)

    def deliver_router_reports(self, rng: random.Random | None = None) -> None:
        self.silent = {name for name in self.silent if not _happens(rng)}

    def restart_engine(self, name: str) -> None:
        self.pods[name].pod = replace(self.pods[name].pod, is_ready=False)

    def kill_pod(self, name: str) -> None:
        del self.pods[name]

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

    def num_staying(self) -> int:
        """Count the serving pods whose Deployment still exists. An engine that restarted behind its open gate does not
        serve: the routers must follow the new process first."""
        revisions = {s.revision for s in self.engine_deployments.values()}
        serving = [live for live in self.pods.values() if live.seen.serves and live.pod.admitted_epoch == live.epoch]
        return sum(live.pod.revision in revisions for live in serving)

    def _routers(self) -> tuple[str, ...]:
        own = ("Deployment", "llm-router") in self.objects
        return ("router-0", "router-1") if own else ("other-router",) if self.shares else ()

    def _report(self, router: str) -> RouterReport:
        ready = {name: live.epoch for name, live in self.pods.items() if live.pod.is_ready}
        return RouterReport(pod=router, admitted=ready)

    def _apply(self, manifest: dict[str, Any]) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._made += 1
        revision = manifest["metadata"]["labels"].get(REVISION_LABEL)
        if kind == "Deployment" and revision is not None:
            before = self.engine_deployments.get(name)
            made = EngineDeployment(
                name=name, uid=f"uid-{self._made}", revision=revision, replicas=0, created=f"{self._made:06}"
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

    def _scale(self, name: str, uid: str, replicas: int) -> None:
        found = self.engine_deployments.get(name)
        if found is not None and found.uid == uid:
            self._made += 1
            self.engine_deployments[name] = replace(found, replicas=replicas, version=str(self._made))
            self.engine_manifests[name]["spec"]["replicas"] = replicas
            self.engine_manifests[name]["metadata"]["annotations"][APPLIED] = f"replicas-{replicas}"

    def _delete(self, kind: str, name: str, uid: str, version: str) -> None:
        if name in self.engine_deployments:
            if (self.engine_deployments[name].uid, self.engine_deployments[name].version) == (uid, version):
                del self.engine_deployments[name], self.engine_manifests[name]
            return
        metadata = self.objects.get((kind, name), {}).get("metadata", {})
        if (metadata.get("uid"), metadata.get("resourceVersion")) == (uid, version):
            del self.objects[kind, name]

    def _start_pod(self, revision: str) -> None:
        self._made += 1
        name = f"pod-{self._made}"
        self.pods[name] = LivePod(Pod(name=name, uid=f"uid-{name}", revision=revision))


def _happens(rng: random.Random | None) -> bool:
    return rng is None or rng.random() < 0.5


def _defaulted(manifest: dict[str, Any]) -> dict[str, Any]:
    manifest["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
    if isinstance(manifest.get("spec"), dict):
        manifest["spec"].setdefault("defaulted", True)
    manifest["status"] = {}
    return manifest
