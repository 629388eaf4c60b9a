"""`View`: all watched objects, indexed by service, from which the observed state of a service is made.

The watches and the responses to the operator's own writes update the view; the planner reads it. All of them run on one
event loop, so there are no locks. Objects are stored as Kubernetes sends them, without fields that are never read.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from octavo_operator.cluster.claims import Claim, Claims
from octavo_operator.cluster.pods import (
    creation_failure,
    is_quota_exceeded,
    is_serving_router,
    pod_of,
    router_trouble,
)
from octavo_operator.cluster.trim import trimmed
from octavo_operator.desired.engine import served_names
from octavo_operator.names import (
    COMPONENT_LABEL,
    DEPLOYMENT,
    ENGINE,
    ENGINE_WORKER,
    GROUP_SET,
    REVISION_LABEL,
    ROUTER,
    ROUTER_LABEL,
    SERVICE_LABEL,
    router_deployment,
)
from octavo_operator.observed import EngineDeployment, Observed, Pod, Ref, RouterReport, ServiceBehind, Upgrades
from octavo_operator.plan.apply_digest import matches
from octavo_operator.plan.operator_upgrade import upgrade_reason
from octavo_operator.plan.owner import is_ours
from octavo_operator.service import ServiceIdentity
from octavo_operator.spec.service import KIND

Key = tuple[str, str]  # namespace, name
Raw = Mapping[str, Any]

K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class View:
    services: dict[Key, Raw] = field(default_factory=dict)
    _objects: dict[Key, dict[Ref, Raw]] = field(default_factory=dict)  # by service
    _returned: dict[Key, dict[Ref, Raw]] = field(default_factory=dict)  # by service: see `Observed.returned`
    _owners: dict[tuple[str, str, str], Key] = field(default_factory=dict)  # namespace, kind, name -> service
    _routers: dict[Key, dict[str, Raw]] = field(default_factory=dict)  # router -> its pods by name
    _router_of: dict[Key, Key] = field(default_factory=dict)  # pod -> router
    _engines: dict[Key, dict[str, Key]] = field(default_factory=dict)  # router -> its engine pods -> their services
    _claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self._claims = Claims(self._served_models)

    def update(self, raw: Raw, *, is_gone: bool = False) -> set[Key]:
        """Store or remove one object; return the services whose plans it may change."""
        raw = trimmed(raw)
        if raw["kind"] == KIND:
            return self._update_service(raw, is_gone=is_gone)
        metadata = raw["metadata"]
        labels = metadata.get("labels") or {}
        service = (metadata["namespace"], labels.get(SERVICE_LABEL, ""))
        ref = (raw["kind"], metadata["name"])
        before = self._owners.get((metadata["namespace"], *ref))
        if before is not None and before != service:  # its service label was removed or changed
            self._forget(before, ref)
            return {before} | (self.update(raw) if SERVICE_LABEL in labels and not is_gone else set())
        if is_older(raw, self._objects.get(service, {}).get(ref), is_gone=is_gone):
            return set()
        is_same = not is_gone and _is_same(raw, self._objects.get(service, {}).get(ref))
        if is_gone:
            self._forget(service, ref)
        else:
            self._store(service, ref, raw)
        if is_same:
            return set()
        if raw["kind"] == "Pod" and labels.get(COMPONENT_LABEL) == ROUTER:
            return self._update_router(raw, labels, is_gone=is_gone) | {service}
        return {service}

    def update_written(self, sent: Raw, response: Raw) -> None:
        """Store the response to a write of the manifest `sent`."""
        self.update(response)
        metadata = response["metadata"]
        service = (metadata["namespace"], (metadata.get("labels") or {}).get(SERVICE_LABEL, ""))
        ref = (response["kind"], metadata["name"])
        if matches(sent, response):
            _drop(self._returned, service, ref)
        else:
            self._returned.setdefault(service, {})[ref] = trimmed(response)

    def upgrades(self, service: Key, beginning: Collection[Key]) -> Upgrades:
        """Rollouts of other services that only the operator's settings caused. `beginning`: services that begin such a
        rollout, which their status does not show yet."""
        reasons = {key: upgrade_reason(raw.get("status") or {}) for key, raw in self.services.items() if key != service}
        running = {key for key, reason in reasons.items() if reason == "RollingOut" or key in beginning}
        stopped = (f"{key[0]}/{key[1]}" for key, reason in reasons.items() if reason == "DeadlineExceeded")
        return Upgrades(len(running), min(stopped, default=""))

    def objects(self) -> Iterator[Raw]:
        """All stored objects, including the InferenceServices."""
        yield from self.services.values()
        for by_ref in self._objects.values():
            yield from by_ref.values()

    def contains(self, raw: Raw) -> bool:
        """Return whether the view has an object of this kind and name, regardless of its current labels."""
        return (raw["metadata"]["namespace"], raw["kind"], raw["metadata"]["name"]) in self._owners

    def _store(self, service: Key, ref: Ref, raw: Raw) -> None:
        self._forget_engine(service, ref)
        self._objects.setdefault(service, {})[ref] = raw
        self._owners[service[0], *ref] = service
        if ref[0] == "Pod" and _is_engine(raw):
            self._engines.setdefault(_labelled_router(raw), {})[ref[1]] = service

    def _forget(self, service: Key, ref: Ref) -> None:
        self._forget_engine(service, ref)
        _drop(self._objects, service, ref)
        _drop(self._returned, service, ref)
        self._owners.pop((service[0], *ref), None)

    def _forget_engine(self, service: Key, ref: Ref) -> None:
        if ref[0] == "Pod" and (pod := self._objects.get(service, {}).get(ref)) is not None:
            _drop(self._engines, _labelled_router(pod), ref[1])

    def services_behind_router(self, router: Key) -> set[Key]:
        """The services whose specs name the router, or whose pods are behind it."""
        return {*self._claims.users(router), *self._engines.get(router, {}).values()}

    def router_of(self, service: ServiceIdentity) -> Key:
        """The router of the service's pods: the one that its spec names or, if that doesn't exist or is not for this
        service, the pods' own."""
        key, named = (service.namespace, service.name), (service.namespace, service.router)
        if self._claims.owns_router(named) and self._claims.may_use_router(key):
            return named
        mine = self._objects.get(key, {})
        engines = (raw for (kind, _), raw in sorted(mine.items()) if kind == "Pod" and _is_engine(raw))
        return next((_labelled_router(raw) for raw in engines), named)

    def services_behind_router_of(self, pod: Key) -> set[Key]:
        """The services behind the router that this pod belongs to."""
        router = self._router_of.get(pod)
        return set() if router is None else self.services_behind_router(router)

    def engines_behind_router_of(self, pod: Key) -> Set[str]:
        """Names of the engine pods behind the router that this router pod belongs to."""
        router = self._router_of.get(pod)
        return frozenset() if router is None else self._engines.get(router, {}).keys()

    def models_of(self, service: Key) -> set[str]:
        """The names of a service's model and adapters, without those that another service behind its router claimed
        first."""
        return {*self._claims.claimed_models(service)} - self._claims.taken_models(service).keys()

    def router_pods(self, router: Key) -> dict[str, Raw]:
        return dict(self._routers.get(router, {}))

    def serving_routers(self, router: Key, reports: Mapping[str, RouterReport]) -> dict[str, RouterReport | None]:
        """The router's pods that receive requests, each with its report. `reports`: by the pod's name."""
        pods = self._routers.get(router, {})
        return {name: reports.get(name) for name, raw in pods.items() if is_serving_router(raw)}

    def engine_pods(self, service: Key) -> tuple[Pod, ...]:
        """The service's engine pods with their workers, ordered by name."""
        pods = [raw for (kind, _), raw in sorted(self._objects.get(service, {}).items()) if kind == "Pod"]
        workers = [pod_of(raw) for raw in pods if _is_engine(raw, ENGINE_WORKER)]
        return tuple(_with_workers(pod_of(raw), workers) for raw in pods if _is_engine(raw))

    def pods(self, service: ServiceIdentity) -> list[Raw]:
        """The service's engine pods, their workers, and the pods of its router."""
        mine = self._objects.get((service.namespace, service.name), {})
        engines = [raw for (kind, _), raw in mine.items() if kind == "Pod"]
        return [*engines, *self._routers.get(self.router_of(service), {}).values()]

    def stateful_sets(self, service: ServiceIdentity) -> dict[Key, str | None]:
        """Map (namespace, name) of each StatefulSet of the service's LeaderWorkerSets to None if it has all pods, else
        to the creation time of its newest pod or, without pods, of the LeaderWorkerSet. The set of the leaders has the
        name of the LeaderWorkerSet; the set of a leader's workers has the name of the leader."""
        key, found = (service.namespace, service.name), dict[Key, str | None]()
        objects = self._objects.get(key, {})
        created = {ref: str(raw["metadata"].get("creationTimestamp") or "") for ref, raw in objects.items()}
        for (kind, name), raw in objects.items():
            if kind == GROUP_SET:
                size = raw["spec"]["leaderWorkerTemplate"]["size"]
                revision = raw["metadata"]["labels"].get(REVISION_LABEL)
                leaders = [pod for pod in self.engine_pods(key) if pod.revision == revision]
                staying = [pod for pod in leaders if not pod.is_terminating]
                lacking = {name: leaders} if len(staying) < raw["spec"].get("replicas", 1) else {}
                lacking |= {pod.name: [pod, *pod.workers] for pod in staying if len(pod.workers) < size - 1}
                for each in (name, *(pod.name for pod in staying)):
                    newest = [created[kind, name], *(created["Pod", pod.name] for pod in lacking.get(each, ()))]
                    found[service.namespace, each] = max(newest) if each in lacking else None
        return found

    def observed(self, service: ServiceIdentity, reports: Mapping[str, RouterReport]) -> Observed:
        """Make the observed state of a service. `reports`: report of each router pod, by the pod's name."""
        key, router = (service.namespace, service.name), self.router_of(service)
        objects = self._objects.get(key, {})
        engines = {ref[1]: raw for ref, raw in objects.items() if _is_engine_deployment(ref, raw)}
        pods = self._routers.get(router, {})
        troubles = [trouble for raw in pods.values() if not is_serving_router(raw) and (trouble := router_trouble(raw))]
        deployment = self._objects.get(router, {}).get(("Deployment", router_deployment(router[1])), {})
        if failure := creation_failure(deployment):
            troubles.append(failure)
        return Observed(
            children={ref: raw for ref, raw in objects.items() if ref[0] != "Pod" and ref[1] not in engines},
            engine_deployments=tuple(_engine_deployment(raw) for raw in engines.values() if is_ours(raw, service)),
            engine_manifests=engines,
            pods=self.engine_pods(key),
            routers=self.serving_routers(router, reports),
            leaving_routers={name: reports.get(name) for name, raw in pods.items() if not is_serving_router(raw)},
            router_trouble=troubles[0] if troubles else "",
            router_owner=service.router if self._claims.owns_router((service.namespace, service.router)) else None,
            may_use_router=self._claims.may_use_router(key),
            host_owner=self._claims.host_owner(key),
            behind_router=self._behind(key),
            taken_models=self._claims.taken_models(key),
            returned=self._returned.get(key, {}),
            status=self.services.get(key, {}).get("status") or {},
        )

    def _update_service(self, raw: Raw, *, is_gone: bool) -> set[Key]:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        if is_older(raw, self.services.get(key), is_gone=is_gone):
            return set()
        if is_gone:
            self.services.pop(key, None)
        else:
            self.services[key] = raw
        before, after = self._claims.update(key, None if is_gone else raw)
        return {key} | self._concerned(before) | self._concerned(after)

    def _concerned(self, claim: Claim) -> set[Key]:
        behind = set() if claim.router is None else self.services_behind_router(claim.router)
        return behind | self._claims.rivals_for_host(claim)

    def _update_router(self, raw: Raw, labels: Mapping[str, str], *, is_gone: bool) -> set[Key]:
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        router = (namespace, labels.get(ROUTER_LABEL, ""))
        if is_gone:
            _drop(self._routers, router, name)
            self._router_of.pop((namespace, name), None)
        else:
            self._routers.setdefault(router, {})[name] = raw
            self._router_of[namespace, name] = router
        return self.services_behind_router(router)

    def _served_models(self, service: Key, router: Key) -> Set[str]:
        """The names that the engines of a service serve behind a router."""
        engines = (raw for ref, raw in self._objects.get(service, {}).items() if _is_engine_deployment(ref, raw))
        return {name for raw in engines if _labelled_router(raw) == router for name in served_names(raw)}

    def _behind(self, router: Key) -> dict[str, ServiceBehind]:
        users = sorted(self._claims.users(router))
        return {user[1]: self._service_behind(user) for user in users if self._claims.claimed_models(user)}

    def _service_behind(self, service: Key) -> ServiceBehind:
        raw = self.services[service]
        spec, scaling = raw["spec"], (raw.get("status") or {}).get("autoscaling") or {}
        sleeps = spec.get("replicas") == 0 and bool((spec.get("autoscaling") or {}).get("scaleToZero"))
        names, adapters = self.models_of(service), self._claims[service].adapters
        models = tuple(sorted(names - adapters))
        return ServiceBehind(models, tuple(sorted(names & adapters)), sleeps, scaling.get("wakeSeconds"))


def is_older(raw: Raw, known: Raw | None, *, is_gone: bool) -> bool:
    """Return whether the object is older than the stored one: the response to a write can arrive before watch events of
    earlier changes.

    The versions of one object are growing numbers. The deletion of an object does not concern a new one of its name.
    """
    if known is None:
        return False
    new, old = raw["metadata"], known["metadata"]
    if new.get("uid") != old.get("uid"):
        return is_gone
    versions = (new.get("resourceVersion", ""), old.get("resourceVersion", ""))
    return not is_gone and all(map(str.isdecimal, versions)) and int(versions[0]) < int(versions[1])


def _is_same(raw: Raw, known: Raw | None) -> bool:
    """Return whether only parts of the object have changed that the view does not store."""
    if known is None:
        return False
    ignored = {"resourceVersion": None}
    return {**raw, "metadata": raw["metadata"] | ignored} == {**known, "metadata": known["metadata"] | ignored}


def _drop(table: dict[K, dict[M, V]], key: K, member: M) -> None:
    """Remove a member of the group `key`; remove the group with its last member."""
    if key in table:
        table[key].pop(member, None)
        if not table[key]:
            del table[key]


def _is_engine_deployment(ref: Ref, raw: Raw) -> bool:
    labels = raw["metadata"].get("labels") or {}
    return ref[0] in (DEPLOYMENT, GROUP_SET) and REVISION_LABEL in labels


def _engine_deployment(raw: Raw) -> EngineDeployment:
    metadata, failure = raw["metadata"], creation_failure(raw)
    return EngineDeployment(
        name=metadata["name"],
        uid=metadata["uid"],
        kind=raw["kind"],
        revision=metadata["labels"][REVISION_LABEL],
        replicas=raw["spec"].get("replicas", 1),
        created=metadata["creationTimestamp"],
        version=metadata.get("resourceVersion", ""),
        failure=failure,
        exceeds_quota=is_quota_exceeded(failure),
        is_deleting="deletionTimestamp" in metadata,
    )


def _is_engine(pod: Raw, component: str = ENGINE) -> bool:
    return (pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == component


def _with_workers(engine: Pod, workers: Iterable[Pod]) -> Pod:
    replica = (engine.revision, engine.ordinal)
    return replace(engine, workers=tuple(each for each in workers if (each.revision, each.ordinal) == replica))


def _labelled_router(raw: Raw) -> Key:
    """The router that the label of a pod, an engine Deployment or a LeaderWorkerSet names, with its namespace."""
    metadata = raw["metadata"]
    return metadata["namespace"], (metadata.get("labels") or {}).get(ROUTER_LABEL, "")
