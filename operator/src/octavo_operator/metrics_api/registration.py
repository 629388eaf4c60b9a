"""`MetricsApi`: serves the cluster's custom metrics, and keeps their certificates and their registration valid.

The chart registers the API (an APIService); only its `caBundle` is written here, by the leader. A failure of the
metrics API never ends the operator: it is logged, and tried again.
"""

import asyncio
import base64
import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.metrics_api.certificates import (
    Authority,
    authority_entries,
    is_due,
    make_server_certificate,
    read_authority,
    renewed,
)
from octavo_operator.metrics_api.server import GROUP, VERSION, FrontProxy, MetricsServer

logger = logging.getLogger(__name__)

EVERY_S, SOON_S = 30.0, 1.0  # between two refreshes; until the API is served
API_SERVICE = f"{VERSION}.{GROUP}"
PROXY_SETTINGS = ("kube-system", "extension-apiserver-authentication")


class MetricsApi:
    """`service`: namespace and name of the Service through which the API server reaches the operators, and of the
    Secret with the authority. `on_change`: called when `is_ours` has changed."""

    def __init__(
        self,
        cluster: Cluster,
        server: MetricsServer,
        *,
        service: tuple[str, str],
        port: int,
        leads: Callable[[], bool],
        on_change: Callable[[], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._server = server
        self._service = service
        self._port = port
        self._leads = leads
        self._on_change = on_change
        self._now = now
        self._issued: tuple[Authority, bytes] | None = None
        self.is_ours = False  # HPAs get custom metrics from this operator

    async def run(self) -> None:
        """Serve until cancelled."""
        logged = ""
        try:
            while True:
                try:
                    await self.refresh()
                    logged = ""
                except Exception as error:  # noqa: BLE001 - a supervisor: the operator works without its metrics API
                    what = str(error) if isinstance(error, ApiError | OSError | ValueError) else repr(error)
                    if what != logged:
                        logged = what
                        logger.warning("the metrics API can't be served yet, trying again: %s", logged)
                await asyncio.sleep(EVERY_S if self._server.port else SOON_S)
        finally:
            await self._server.stop()

    async def refresh(self) -> None:
        """Bring certificates, registration and server up to date. Raises ApiError, OSError and ValueError."""
        await self.find_owner()
        authority = await self._authority()
        if authority is None:
            return  # the leader makes it
        await self._server.use(self._certificate(authority), await self._front_proxy())
        if not self._server.port:
            await self._server.start(self._port)
        if self._leads():
            await self._register(authority)

    async def find_owner(self) -> None:
        """Find out whether the API is served by this operator's Service. Raises ApiError and keeps the last answer."""
        was_ours, self.is_ours = self.is_ours, await self._is_preferred()
        if was_ours != self.is_ours:
            self._on_change()

    async def _is_preferred(self) -> bool:
        """Return whether the preferred version of the group is served by this operator's Service."""
        try:
            group = await self._cluster.read_path(f"/apis/{GROUP}")
            version = group.get("preferredVersion", {}).get("version", "")
            api_service = await self._cluster.read("APIService", None, f"{version}.{GROUP}")
        except ApiError as error:
            if error.is_gone or error.status == HTTPStatus.FORBIDDEN:  # no APIService, or one of an unknown version
                return False
            raise
        service = api_service.get("spec", {}).get("service") or {}
        return (service.get("namespace"), service.get("name")) == self._service

    async def _authority(self) -> Authority | None:
        """Read the authority; the leader makes it if it is missing, and replaces it in time."""
        secret = await self._read_secret()
        authority = None if secret is None else read_authority(_decoded(secret))
        if not self._leads():
            return authority
        renewed_authority = renewed(authority, self._now())
        if renewed_authority != authority:
            logger.info("the metrics API gets a new certificate authority")
            if authority is not None:
                await self._patch_bundle(renewed_authority.bundle)
            await self._write_secret(renewed_authority, secret)
        return renewed_authority

    async def _read_secret(self) -> dict[str, Any] | None:
        try:
            return await self._cluster.read("Secret", *self._service)
        except ApiError as error:
            if not error.is_gone:
                raise
        return None

    async def _write_secret(self, authority: Authority, before: Mapping[str, Any] | None) -> None:
        entries = {entry: base64.b64encode(value).decode() for entry, value in authority_entries(authority).items()}
        namespace, name = self._service
        metadata = {"name": name, "namespace": namespace}
        manifest = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": entries}
        if before is None:
            await self._cluster.create(manifest)
        else:  # the version makes the write fail if another leader was faster
            version = before["metadata"]["resourceVersion"]
            await self._cluster.replace({**manifest, "metadata": {**metadata, "resourceVersion": version}})

    def _certificate(self, authority: Authority) -> bytes:
        if self._issued is None or self._issued[0] != authority or is_due(self._issued[1], self._now()):
            namespace, name = self._service
            issued = make_server_certificate(authority, f"{name}.{namespace}.svc", self._now())
            self._issued = (authority, issued)
        return self._issued[1]

    async def _front_proxy(self) -> FrontProxy:
        """Read which clients are the API server's proxy. Raises ValueError if the cluster has no proxy."""
        data = (await self._cluster.read("ConfigMap", *PROXY_SETTINGS)).get("data") or {}
        if "requestheader-client-ca-file" not in data:
            where = "/".join(PROXY_SETTINGS)
            raise ValueError(f"ConfigMap {where} has no requestheader-client-ca-file: enable the aggregation layer")
        return FrontProxy(data["requestheader-client-ca-file"], _names(data.get("requestheader-allowed-names") or "[]"))

    async def _register(self, authority: Authority) -> None:
        api_service = await self._cluster.read("APIService", None, API_SERVICE)
        if api_service["spec"].get("caBundle") != base64.b64encode(authority.bundle).decode():
            await self._patch_bundle(authority.bundle)

    async def _patch_bundle(self, bundle: bytes) -> None:
        logger.info("writes the certificates of the metrics API into APIService %s", API_SERVICE)
        spec = {"caBundle": base64.b64encode(bundle).decode()}
        await self._cluster.patch("APIService", None, API_SERVICE, {"spec": spec})


def _names(text: str) -> tuple[str, ...]:
    """Read a list of names, or null, from JSON. Raises ValueError for other content."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = text
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        where = "/".join(PROXY_SETTINGS)
        raise ValueError(f"requestheader-allowed-names of ConfigMap {where} is {text}: it must be a JSON list of names")
    return tuple(names)


def _decoded(secret: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: base64.b64decode(value) for name, value in (secret.get("data") or {}).items()}
