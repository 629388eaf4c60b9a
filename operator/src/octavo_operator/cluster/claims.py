"""`Claims` decides which service gets a host, a model's name or a router that the specs of several services claim.

The oldest service that claims a host with a path, or a name behind a router, gets it.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo_operator.service import read_running_parts
from octavo_operator.spec.service import InvalidSpec, read_spec

Key = tuple[str, str]  # namespace, name
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Claim:
    """The router of a service, and names that no other service may have: the host with path, and each name of a model
    or adapter behind its router. `adapters`: names of its adapters. `allow_from`: names of the services that may use
    its own router; None: all. `created`: timestamp of the service."""

    created: str = ""
    router: Key | None = None
    host: tuple[str, str] | None = None
    models: frozenset[tuple[Key, str]] = frozenset()  # router, name
    adapters: frozenset[str] = frozenset()
    allow_from: frozenset[str] | None = None


_NOTHING = Claim()


@dataclass(slots=True)
class Claims:
    """`served_models`: names that the engines of a service serve behind a router."""

    served_models: Callable[[Key, Key], Set[str]] = field(compare=False, repr=False)
    _claims: dict[Key, Claim] = field(default_factory=dict)
    _hosts: dict[tuple[str, str], set[Key]] = field(default_factory=dict)
    _models: dict[tuple[Key, str], set[Key]] = field(default_factory=dict)
    _users: dict[Key, set[Key]] = field(default_factory=dict)  # router -> services whose specs name it

    def __getitem__(self, service: Key) -> Claim:
        return self._claims.get(service, _NOTHING)

    def update(self, service: Key, raw: Mapping[str, Any] | None) -> tuple[Claim, Claim]:
        """Store the claim of a service, or remove it; return the claims before and after."""
        before, after = self._claims.pop(service, _NOTHING), _NOTHING if raw is None else _claim_of(raw)
        if raw is not None:
            self._claims[service] = after
        _move(self._users, service, before.router, after.router)
        _move(self._hosts, service, before.host, after.host)
        for model in before.models - after.models:
            _move(self._models, service, model, None)
        for model in after.models - before.models:
            _move(self._models, service, None, model)
        return before, after

    def users(self, router: Key) -> Set[Key]:
        """The services whose specs name the router."""
        return self._users.get(router, set())

    def rivals_for_host(self, claim: Claim) -> Set[Key]:
        """The services that claim the host and path of `claim`."""
        return set() if claim.host is None else self._hosts.get(claim.host, set())

    def owns_router(self, router: Key) -> bool:
        return self[router].router == router

    def may_use_router(self, service: Key) -> bool:
        """Return whether the router in the service's spec is the service's own router, or admits this service."""
        router = self[service].router
        allowed = None if router is None else self[router].allow_from
        return router == service or allowed is None or service[1] in allowed

    def claimed_models(self, service: Key) -> Set[str]:
        """Return the names that a service claims at the router of its spec: those of the spec's model and adapters or,
        if the service may not use this router, those of the model that its engines already serve there."""
        claim = self[service]
        if self.may_use_router(service):
            return {name for _, name in claim.models}
        return set() if claim.router is None else self.served_models(service, claim.router)

    def host_owner(self, service: Key) -> str | None:
        """Name of the service that claimed this service's host and path first; None if that is the service itself."""
        first = self._first(self.rivals_for_host(self[service]), service)
        return None if first == service else "/".join(first)

    def taken_models(self, service: Key) -> dict[str, str]:
        """Map names of this service's model and adapters that belong to another service of its router to that service.
        A service whose model has the name precedes services whose adapter has it; otherwise the oldest service does."""
        router = self[service].router
        if router is None:
            return {}
        names = sorted(self.claimed_models(service))
        firsts = {name: self._first(self._rivals(router, name), service, name) for name in names}
        return {name: first[1] for name, first in firsts.items() if first != service}

    def _rivals(self, router: Key, model: str) -> Iterator[Key]:
        """The services that claim a model name behind a router."""
        yield from (key for key in self._models.get((router, model), ()) if self.may_use_router(key))
        if self[router].allow_from is not None:
            refused = (key for key in self.users(router) if not self.may_use_router(key))
            yield from (key for key in refused if model in self.claimed_models(key))

    def _first(self, rivals: Iterable[Key], default: Key, name: str = "") -> Key:
        """Return the service that was created first; of several, the first by name. `name`: services that have an
        adapter of this name come last."""

        def order(service: Key) -> tuple[bool, str, Key]:
            return name in self[service].adapters, self[service].created, service

        return min(rivals, key=order, default=default)


def _claim_of(raw: Mapping[str, Any]) -> Claim:
    parts = read_running_parts(raw)
    created, router = raw["metadata"].get("creationTimestamp", ""), (parts.namespace, parts.router)
    try:
        spec = read_spec(raw)
    except InvalidSpec:
        # Its pods keep running behind the router.
        return Claim(created, router, allow_from=parts.allow_from)
    ingress = spec.exposure.ingress if spec.exposure else None
    host = None if ingress is None else (ingress.host, (ingress.path or "/").rstrip("/"))
    adapters = frozenset(adapter.name for adapter in spec.adapters or ())
    names = adapters.union(spec.model.served_names or (parts.name,))
    return Claim(created, router, host, frozenset((router, name) for name in names), adapters, parts.allow_from)


def _move(table: dict[K, set[Key]], service: Key, before: K | None, after: K | None) -> None:
    if before == after:
        return
    if before is not None and before in table:
        table[before].discard(service)
        if not table[before]:
            del table[before]
    if after is not None:
        table.setdefault(after, set()).add(service)
