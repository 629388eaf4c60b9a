"""Kubernetes' EndpointSlices as its API writes them, as far as they say where replicas are. Pure.

A pod that isn't ready is in them too: the router follows it, so that its blocks are known when it is. A condition that
is missing means ready.
"""

from collections.abc import Iterable

import msgspec

from octavo_server.router.fleet.discovery.dns import endpoint_at
from octavo_server.router.fleet.endpoint import Endpoint

SERVICE_LABEL = "kubernetes.io/service-name"


class Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class Conditions(msgspec.Struct):
    ready: bool | None = None


class Target(msgspec.Struct):
    name: str = ""


class SliceEndpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: Conditions = msgspec.field(default_factory=Conditions)
    target_ref: Target | None = None


class Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct):
    metadata: Meta
    items: list[EndpointSlice] | None = None


class Status(msgspec.Struct):
    """What the API answers instead of what was asked for."""

    code: int = 0
    message: str = ""


class Event(msgspec.Struct):
    """Of a watch: ADDED, MODIFIED, DELETED and BOOKMARK have a slice, ERROR a status."""

    type: str
    object: msgspec.Raw


def endpoints_of(slices: Iterable[EndpointSlice], *, port: str, scheme: str = "http") -> frozenset[Endpoint]:
    """`port`: its name or number; empty for the only one, or the first. A pod that is in several slices counts once."""
    found: dict[str, Endpoint] = {}
    for piece in sorted(slices, key=lambda piece: (piece.address_type, piece.metadata.name)):
        number = _port(piece.ports or [], port)
        for endpoint in piece.endpoints or [] if number else []:
            place = _place(endpoint, number, scheme)
            if place is not None and (place.name not in found or (place.is_ready and not found[place.name].is_ready)):
                found[place.name] = place
    return frozenset(found.values())


def _place(endpoint: SliceEndpoint, port: int, scheme: str) -> Endpoint | None:
    if not endpoint.addresses:
        return None
    name = endpoint.target_ref.name if endpoint.target_ref else ""
    is_ready = endpoint.conditions.ready is not False
    return endpoint_at(scheme, endpoint.addresses[0], port, name=name, is_ready=is_ready)


def _port(ports: list[Port], wanted: str) -> int:
    """0 if it has none of that name."""
    for port in ports:
        if port.port and wanted in ("", port.name or "", str(port.port)):
            return port.port
    return 0
