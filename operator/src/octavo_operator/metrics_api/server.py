"""`MetricsServer`: serves the custom metrics of services to the API server over TLS.

Its only client is the API server's front proxy, which shows a client certificate of the cluster's request header
authority (kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer). The API server has authenticated the
user and checked the user's rights before it forwards a request, so only that certificate is checked here.

The types of the documents are those of k8s.io/metrics/pkg/apis/custom_metrics/v1beta2, without fields that their
clients don't read.
"""

import logging
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web

from octavo_operator.names import METRIC_NAMES
from octavo_operator.scaling.service_load import ServiceLoad
from octavo_operator.spec.quantity import to_milli
from octavo_operator.spec.service import GROUP as SERVICE_GROUP
from octavo_operator.spec.service import KIND
from octavo_operator.spec.service import VERSION as SERVICE_VERSION
from octavo_operator.timestamps import now_text

logger = logging.getLogger(__name__)

LoadOf = Callable[[tuple[str, str]], ServiceLoad | None]
GROUP, VERSION = "custom.metrics.k8s.io", "v1beta2"
GROUP_VERSION = f"{GROUP}/{VERSION}"
ROOT = f"/apis/{GROUP_VERSION}"
RESOURCE = f"inferenceservices.{SERVICE_GROUP}"
METRICS = tuple(METRIC_NAMES.values())

Document = dict[str, Any]


def resource_list() -> Document:
    """The API's resources, which clients discover."""
    resources = [
        {
            "name": f"{RESOURCE}/{metric}",
            "singularName": "",
            "namespaced": True,
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        for metric in METRICS
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": resources}


def value_list(namespace: str, name: str, metric: str, value: float, now: str) -> Document:
    """The value of one metric of a service, in thousandths. `now`: RFC 3339."""
    service = {
        "kind": KIND,
        "namespace": namespace,
        "name": name,
        "apiVersion": f"{SERVICE_GROUP}/{SERVICE_VERSION}",
    }
    item = {
        "describedObject": service,
        "metric": {"name": metric},
        "timestamp": now,
        "value": f"{to_milli(value)}m",
    }
    return {"kind": "MetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": [item]}


def failure(status: HTTPStatus, message: str) -> Document:
    """An error in the form in which the API server answers errors."""
    reason = "".join(word.capitalize() for word in status.phrase.split())
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": status.value,
    }


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """The clients that are admitted. `authority`: PEM. `names`: common names of their certificates; empty for any."""

    authority: str
    names: tuple[str, ...] = ()


class MetricsServer:
    """`load_of`: load of the service with this namespace and name."""

    def __init__(self, load_of: LoadOf) -> None:
        self._load_of = load_of
        self._names: tuple[str, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._authority = ""
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; 0 if none is."""
        addresses: Sequence[Any] = () if self._runner is None else self._runner.addresses
        return int(addresses[0][1]) if addresses else 0

    async def use(self, certificate: bytes, proxy: FrontProxy) -> None:
        """Answer new connections with this certificate (PEM, with its key) and admit these clients. A new authority of
        clients stops the server, which closes the connections of the old one: `start` it again. Raises ValueError and
        ssl.SSLError for texts that are no certificates."""
        context = self._context
        if context is None or proxy.authority != self._authority:
            context = _context(proxy.authority)
        with tempfile.NamedTemporaryFile() as file:  # ssl reads certificates from files only
            file.write(certificate)
            file.flush()
            context.load_cert_chain(file.name)
        if context is not self._context:
            await self.stop()
        self._context, self._authority, self._names = context, proxy.authority, proxy.names

    async def start(self, port: int, host: str | None = None) -> None:
        """Listen. `use` must have been called before. Raises OSError if the port is taken."""
        app = web.Application(middlewares=[self._admit])
        metric = f"{ROOT}/namespaces/{{namespace}}/{RESOURCE}/{{name}}/{{metric}}"
        app.add_routes([web.get(ROOT, self._discover), web.get(metric, self._value)])
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=self._context).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = _common_name(request)
        if self._names and name not in self._names:
            return _failed(HTTPStatus.FORBIDDEN, f"the client certificate is for {name!r}, not for the front proxy")
        try:
            answer: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            return _failed(HTTPStatus(error.status), f"{request.path}: {error.reason}")
        return answer

    async def _discover(self, _: web.Request) -> web.Response:
        return web.json_response(resource_list())

    async def _value(self, request: web.Request) -> web.Response:
        namespace, name, metric = (request.match_info[part] for part in ("namespace", "name", "metric"))
        if metric not in METRICS:
            what = f"there is no metric {metric!r} of an InferenceService: use {' or '.join(METRICS)}"
            return _failed(HTTPStatus.NOT_FOUND, what)
        load = self._load_of((namespace, name))
        if load is None:
            what = f"the load of InferenceService {namespace}/{name} is not known: it does not exist, or one of its"
            return _failed(HTTPStatus.NOT_FOUND, f"{what} routers or replicas has not reported for some seconds")
        return web.json_response(value_list(namespace, name, metric, getattr(load, metric), now_text()))


def _context(authority: str) -> ssl.SSLContext:
    """A context that requires a client certificate of the authority. It may be an intermediate one: Kubernetes trusts
    every certificate of the file itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=authority)
    return context


def _common_name(request: web.Request) -> str:
    shown: Any = None if request.transport is None else request.transport.get_extra_info("peercert")
    names = [value for part in (shown or {}).get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if names else ""


def _failed(status: HTTPStatus, message: str) -> web.Response:
    content: Document = failure(status, message)
    return web.json_response(content, status=status)
