"""`Claim`: the names and the router that one service claims among all services, by its spec."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.service import read_running_parts
from octavo_operator.spec.service import InvalidSpec, read_spec

Key = tuple[str, str]  # namespace, name


@dataclass(frozen=True, slots=True)
class Claim:
    """The router of a service, and names that no other service may have: the host with path, and each name of a model
    or adapter behind its router. `adapters`: those of the names that are adapters. `allow_from`: names of the services
    that may use its own router; None: all."""

    router: Key | None = None
    host: tuple[str, str] | None = None
    models: frozenset[tuple[Key, str]] = frozenset()  # router, name
    adapters: frozenset[str] = frozenset()
    allow_from: frozenset[str] | None = None


NOTHING = Claim()


def claim_of(raw: Mapping[str, Any]) -> Claim:
    parts = read_running_parts(raw)
    router = (parts.namespace, parts.router)
    try:
        spec = read_spec(raw)
    except InvalidSpec:
        return Claim(router, allow_from=parts.allow_from)  # its pods run on, and the router's reports concern them
    ingress = spec.exposure.ingress if spec.exposure else None
    host = None if ingress is None else (ingress.host, (ingress.path or "/").rstrip("/"))
    adapters = frozenset(adapter.name for adapter in spec.adapters or ())
    names = adapters.union(spec.model.served_names or (parts.name,))
    return Claim(router, host, frozenset((router, name) for name in names), adapters, parts.allow_from)
