"""Kubernetes' EndpointSlices: the fields that hold the addresses of replicas. Pure.

Slices also list pods that aren't ready: the router follows their KV streams, so that their blocks are known when they
become ready. An endpoint without the condition `ready` counts as ready.
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


class TargetReference(msgspec.Struct):
    name: str = ""


class SliceEndpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: Conditions = msgspec.field(default_factory=Conditions)
    target_ref: TargetReference | None = None


class SlicePort(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


class SliceList(msgspec.Struct):
    metadata: Meta
    items: list[EndpointSlice] | None = None


class Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class WatchEvent(msgspec.Struct):
    """An event of a watch: ADDED, MODIFIED, DELETED and BOOKMARK carry a slice, ERROR a status."""

    type: str
    object: msgspec.Raw


def endpoints_of(slices: Iterable[EndpointSlice], *, port: str, scheme: str = "http") -> frozenset[Endpoint]:
    """Endpoints in the slices. `port`: name or number; the first port if empty. A pod in several slices counts once."""
    places: dict[str, Endpoint] = {}
    for piece in sorted(slices, key=lambda piece: (piece.address_type, piece.metadata.name)):
        number = _port(piece.ports or [], port)
        for endpoint in piece.endpoints or [] if number else []:
            place = _place(endpoint, number, scheme)
            if place is not None and (place.name not in places or (place.is_ready and not places[place.name].is_ready)):
                places[place.name] = place
    return frozenset(places.values())


def _place(endpoint: SliceEndpoint, port: int, scheme: str) -> Endpoint | None:
    if not endpoint.addresses:
        return None
    name = endpoint.target_ref.name if endpoint.target_ref else ""
    is_ready = endpoint.conditions.ready is not False
    return endpoint_at(scheme, endpoint.addresses[0], port, name=name, is_ready=is_ready)


def _port(ports: list[SlicePort], wanted: str) -> int:
    """Number of the port whose name or number is `wanted`, or of the first one if that is empty. 0 if there is none."""
    for port in ports:
        if port.port and wanted in ("", port.name or "", str(port.port)):
            return port.port
    return 0
