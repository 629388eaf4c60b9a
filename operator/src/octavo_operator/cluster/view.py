"""`View`: every watched object, found by service, and what is observed of one service made from it.

Fed by watches, read by the planner; both on one event loop, so that nothing is locked. Objects are kept as Kubernetes
sent them, without what nobody reads (managed fields).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.cluster.pods import creation_failure, is_serving_router, pod_of, router_trouble
from octavo_operator.names import (
    COMPONENT_LABEL,
    ENGINE,
    REVISION_LABEL,
    ROUTER,
    ROUTER_LABEL,
    SERVICE_LABEL,
    router_deployment,
)
from octavo_operator.observed import EngineSet, Observed, Pod, Ref, RouterReport
from octavo_operator.plan.owner import is_ours
from octavo_operator.service import Service
from octavo_operator.spec.service import KIND, InvalidSpec, read_spec

Key = tuple[str, str]  # namespace, name
Raw = Mapping[str, Any]


@dataclass(slots=True)
class View:
    services: dict[Key, Raw] = field(default_factory=dict)
    _objects: dict[Key, dict[Ref, Raw]] = field(default_factory=lambda: defaultdict(dict))  # by service
    _homes: dict[tuple[str, str, str], Key] = field(default_factory=dict)  # namespace, kind, name -> its service
    _routers: dict[Key, dict[str, Raw]] = field(default_factory=lambda: defaultdict(dict))  # pods by router
    _hosts: dict[tuple[str, str], set[Key]] = field(default_factory=lambda: defaultdict(set))
    _users: dict[Key, set[Key]] = field(default_factory=lambda: defaultdict(set))  # services by router

    def see(self, raw: Raw, *, is_gone: bool = False) -> set[Key]:
        """Takes in one object; the services that it may matter to."""
        if raw["kind"] == KIND:
            return self._see_service(raw, is_gone=is_gone)
        metadata = raw["metadata"]
        labels = metadata.get("labels") or {}
        service = (metadata["namespace"], labels.get(SERVICE_LABEL, ""))
        ref = (raw["kind"], metadata["name"])
        before = self._homes.get((metadata["namespace"], *ref))
        if before is not None and before != service:  # somebody took our label away
            self._forget(before, ref)
            return {before} | (self.see(raw) if SERVICE_LABEL in labels and not is_gone else set())
        if is_older(raw, self._objects[service].get(ref), is_gone=is_gone):
            return set()
        if is_gone:
            self._forget(service, ref)
        else:
            self._objects[service][ref] = raw
            self._homes[metadata["namespace"], *ref] = service
        if raw["kind"] == "Pod" and labels.get(COMPONENT_LABEL) == ROUTER:
            return self._see_router(raw, labels, is_gone=is_gone) | {service}
        return {service}

    def has(self, raw: Raw) -> bool:
        """Whether an object of this name is known."""
        return (raw["metadata"]["namespace"], raw["kind"], raw["metadata"]["name"]) in self._homes

    def _forget(self, service: Key, ref: Ref) -> None:
        self._objects[service].pop(ref, None)
        self._homes.pop((service[0], *ref), None)

    def behind(self, router: Key) -> set[Key]:
        """The services that a router serves."""
        return set(self._users.get(router, ()))

    def served_by(self, pod: Key) -> set[Key]:
        """The services behind the router that a pod is of."""
        routers = [router for router, pods in self._routers.items() if router[0] == pod[0] and pod[1] in pods]
        return {service for router in routers for service in self.behind(router)}

    def router_pods(self, router: Key) -> dict[str, Raw]:
        return dict(self._routers.get(router, {}))

    def pods(self, service: Service) -> list[Raw]:
        """Its engines and the routers in front of them."""
        mine = self._objects.get((service.namespace, service.name), {})
        engines = [raw for (kind, _), raw in mine.items() if kind == "Pod"]
        return [*engines, *self._routers.get((service.namespace, service.router), {}).values()]

    def observed(self, service: Service, reports: Mapping[str, RouterReport]) -> Observed:
        """`reports`: by name of the router pod."""
        key, router = (service.namespace, service.name), (service.namespace, service.router)
        objects = self._objects.get(key, {})
        engines = {ref[1]: raw for ref, raw in objects.items() if _is_engine_set(ref, raw)}
        pods = self._routers.get(router, {})
        serving = [name for name, raw in pods.items() if is_serving_router(raw)]
        troubles = [trouble for raw in pods.values() if not is_serving_router(raw) and (trouble := router_trouble(raw))]
        deployment = self._objects.get(router, {}).get(("Deployment", router_deployment(service.router)), {})
        if failure := creation_failure(deployment):
            troubles.append(failure)
        return Observed(
            children={ref: raw for ref, raw in objects.items() if ref[0] != "Pod" and ref[1] not in engines},
            engine_sets=tuple(_engine_set(raw) for raw in engines.values() if is_ours(raw, service)),
            engine_manifests=engines,
            pods=tuple(_engine_pods(objects)),
            routers={name: reports.get(name) for name in serving},
            router_trouble=troubles[0] if troubles else "",
            router_owner=service.router if self._owns_router(router) else None,
            host_owner=self._host_owner(service),
            status=self.services.get(key, {}).get("status") or {},
        )

    def _see_service(self, raw: Raw, *, is_gone: bool) -> set[Key]:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        if is_older(raw, self.services.get(key), is_gone=is_gone):
            return set()
        before = self._claims(self.services.get(key))
        if is_gone:
            self.services.pop(key, None)
        else:
            self.services[key] = raw
        after = self._claims(self.services.get(key))
        self._note(key, before, after)
        concerned = {other for claim in (before, after) for other in self._concerned(claim)}
        return concerned | {key}

    def _claims(self, raw: Raw | None) -> tuple[Key | None, tuple[str, str] | None]:
        """The router that a service is behind, and the host and path that it wants."""
        if raw is None:
            return None, None
        try:
            spec = read_spec(raw)
        except InvalidSpec:
            return None, None
        router = spec.router.ref.name if spec.router.ref else raw["metadata"]["name"]
        ingress = spec.exposure.ingress if spec.exposure else None
        host = None if ingress is None else (ingress.host, (ingress.path or "/").rstrip("/"))
        return (raw["metadata"]["namespace"], router), host

    def _note(self, key: Key, before: Any, after: Any) -> None:
        for table, index in ((self._users, 0), (self._hosts, 1)):
            if before[index] is not None:
                table[before[index]].discard(key)
            if after[index] is not None:
                table[after[index]].add(key)

    def _concerned(self, claim: Any) -> set[Key]:
        router, host = claim
        return set(self._users.get(router, ())) | set(self._hosts.get(host, ()))

    def _see_router(self, raw: Raw, labels: Mapping[str, str], *, is_gone: bool) -> set[Key]:
        router = (raw["metadata"]["namespace"], labels.get(ROUTER_LABEL, ""))
        if is_gone:
            self._routers[router].pop(raw["metadata"]["name"], None)
        else:
            self._routers[router][raw["metadata"]["name"]] = raw
        return self.behind(router)

    def _owns_router(self, router: Key) -> bool:
        return self._claims(self.services.get(router))[0] == router

    def _host_owner(self, service: Service) -> str | None:
        """Who had this host first, if it was another one."""
        key = (service.namespace, service.name)
        host = self._claims(self.services.get(key))[1]
        rivals = self._hosts.get(host, set()) if host is not None else set()
        first = min(rivals, key=lambda k: (self.services[k]["metadata"]["creationTimestamp"], k), default=key)
        return None if first == key else "/".join(first)


def is_older(raw: Raw, known: Raw | None, *, is_gone: bool) -> bool:
    """Than what is known: the answer to our own write came before its watch told of what was there till then."""
    if known is None or (is_gone and raw["metadata"].get("uid") == known["metadata"].get("uid")):
        return False
    if raw["metadata"].get("uid") != known["metadata"].get("uid"):
        return is_gone
    versions = [str(each["metadata"].get("resourceVersion", "")) for each in (raw, known)]
    return all(version.isdecimal() for version in versions) and int(versions[0]) < int(versions[1])


def _is_engine_set(ref: Ref, raw: Raw) -> bool:
    labels = raw["metadata"].get("labels") or {}
    return ref[0] == "Deployment" and REVISION_LABEL in labels


def _engine_set(raw: Raw) -> EngineSet:
    metadata = raw["metadata"]
    return EngineSet(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=metadata["labels"][REVISION_LABEL],
        replicas=raw["spec"].get("replicas", 1),
        created=metadata["creationTimestamp"],
        version=metadata.get("resourceVersion", ""),
        failure=creation_failure(raw),
        is_deleting="deletionTimestamp" in metadata,
    )


def _engine_pods(objects: Mapping[Ref, Raw]) -> Iterable[Pod]:
    for (kind, _), raw in sorted(objects.items()):
        labels = raw["metadata"].get("labels") or {}
        if kind == "Pod" and labels.get(COMPONENT_LABEL) == ENGINE:
            yield pod_of(raw)
