"""Replicas of a Kubernetes Service, ready or not, from its EndpointSlices, which are listed once and then watched.

The client speaks plain HTTP as the API's documentation describes: the watch begins at the list's resourceVersion,
bookmarks advance it, and after 410 Gone the slices are listed again. Failures are retried with a back-off; meanwhile
the replicas stay unchanged, so an unreachable API server removes no replica. The token and the CA are read for each
connection, as the kubelet replaces both.

Slices also list pods that aren't ready: the router follows their KV streams, so that their blocks are known when they
become ready. An endpoint without the condition `ready` counts as ready.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from octavo_engine.wire.errors import StartupError

from octavo_server.backoff import Backoff
from octavo_server.router.fleet.discovery.dns import endpoint_at
from octavo_server.router.fleet.endpoint import Endpoint

logger = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_S = 60  # limit of one watch, which also ends a dead connection; the next watch begins where it ended
SLACK_S = 15.0
ANSWER_S = 15.0
MAX_EVENT_BYTES = 4 * 1024 * 1024
GONE = 410

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


_read_event = msgspec.json.Decoder(WatchEvent).decode
_read_slice = msgspec.json.Decoder(EndpointSlice).decode
_read_list = msgspec.json.Decoder(SliceList).decode
_read_status = msgspec.json.Decoder(Status).decode


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> "ClusterAccess":
        """Read the access from the environment and service account of the pod. Raises StartupError outside of a pod."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError:
            namespace = ""
        if not host or not port or not namespace:
            raise StartupError(
                "--kubernetes: the router doesn't run in a pod with a service account. Outside of a pod, give "
                "--kubernetes-api URL, such as http://127.0.0.1:8001 of `kubectl proxy`."
            )
        host = f"[{host}]" if ":" in host else host
        return cls(
            url=f"https://{host}:{port}",
            namespace=namespace,
            token_file=account / "token",
            ca_file=account / "ca.crt",
        )


class ApiRefusal(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code} {message}")
        self.code = code


class KubernetesDiscovery:
    """`service`: [NAMESPACE/]SERVICE[:PORT]."""

    def __init__(self, service: str, access: ClusterAccess, *, backoff: Backoff | None = None) -> None:
        path, _, self._port = service.partition(":")
        namespace, _, self._service = path.rpartition("/")
        if not self._service or "/" in namespace:
            raise StartupError(f"--kubernetes {service}: expected [NAMESPACE/]SERVICE[:PORT].")
        self._access = access
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace or access.namespace}/endpointslices"
        self._backoff = backoff or Backoff(least_s=0.1, most_s=10.0)
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""  # resourceVersion at which the next watch begins; empty: list the slices first

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        latest: frozenset[Endpoint] | None = None
        clock = asyncio.get_running_loop().time
        timeout = aiohttp.ClientTimeout(total=WATCH_S + SLACK_S, connect=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_EVENT_BYTES) as session:
            while True:
                began_s = clock()
                try:
                    async for _ in self._follow(session):
                        now = endpoints_of(self._slices.values(), port=self._port)
                        if now != latest:
                            latest = now
                            yield now
                except ApiRefusal as error:
                    self._handle_refusal(error)
                except (aiohttp.ClientError, msgspec.MsgspecError, TimeoutError, OSError, ValueError) as error:
                    logger.warning(
                        "the Kubernetes API failed: %s; the router keeps the replicas that it found before",
                        error or "no answer",
                    )
                await asyncio.sleep(self._backoff.next_wait_s(lasted_s=clock() - began_s))

    async def _follow(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """List the slices unless a watch can resume, then run one watch. Yield after each change."""
        if not self._version:
            listed = _read_list(await self._read(session))
            self._slices = {piece.metadata.name: piece for piece in listed.items or []}
            self._version = listed.metadata.resource_version
            yield
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        async with self._get(session, query | {"resourceVersion": self._version}) as answer:
            await _check(answer)
            while line := await answer.content.readline():
                self._apply_event(_read_event(line))
                yield

    def _apply_event(self, event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = _read_status(event.object)
            raise ApiRefusal(status.code, status.message)
        piece = _read_slice(event.object)
        if event.type == "DELETED":
            self._slices.pop(piece.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._slices[piece.metadata.name] = piece
        self._version = piece.metadata.resource_version

    def _handle_refusal(self, error: ApiRefusal) -> None:
        if error.code == GONE:
            logger.info("the Kubernetes API no longer has the resourceVersion of this watch: listing again")
            self._version = ""
            return
        hint = ": the service account must be allowed to list and watch endpointslices" if error.code == 403 else ""
        logger.warning(
            "the Kubernetes API failed: %s%s; the router keeps the replicas that it found before", error, hint
        )

    async def _read(self, session: aiohttp.ClientSession) -> bytes:
        async with asyncio.timeout(ANSWER_S), self._get(session, {}) as answer:
            await _check(answer)
            return await answer.read()

    def _get(self, session: aiohttp.ClientSession, query: dict[str, str]) -> "aiohttp.client._RequestContextManager":
        access = self._access
        token = access.token_file.read_text().strip() if access.token_file else ""
        return session.get(
            access.url + self._path,
            params={"labelSelector": f"{SERVICE_LABEL}={self._service}", **query},
            headers={"accept": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {}),
            allow_redirects=False,
            ssl=ssl.create_default_context(cafile=access.ca_file) if access.ca_file else True,
        )


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        try:
            message = _read_status(await answer.read()).message
        except msgspec.MsgspecError:
            message = answer.reason or ""
        raise ApiRefusal(answer.status, message)
