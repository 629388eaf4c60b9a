"""The part of the Kubernetes API that discovery uses, with its real JSON: list and watch of EndpointSlices.

As in the real API, each change gets the next resourceVersion, a watch can start from any version that isn't compacted,
and a 410 is either the status of a new watch or an ERROR event in a running one.
"""

import asyncio
import json
from typing import Any

from aiohttp import web

GROUP = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
LABEL = "kubernetes.io/service-name"


class FakeKubernetes:
    def __init__(self, token: str = "") -> None:
        self.token = token
        self.refusal: tuple[int, str] | None = None
        self.num_lists = self.num_watches = 0
        self.queries: list[dict[str, str]] = []
        self.watch_s = 30.0
        self.port = 0
        self._version = 100
        self._oldest = 0
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._transports: set[asyncio.BaseTransport] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(GROUP, self._answer)
        self._runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            for transport in self._transports:
                assert isinstance(transport, asyncio.Transport)
                transport.abort()
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def put(self, name: str, pods: dict[str, bool | None], *, service: str = "engine", port: int = 8000) -> None:
        """Create or replace a slice. `pods` maps addresses to readiness; the pod at 10.0.0.1 is named pod-1."""
        self._version += 1
        piece = {
            "kind": "EndpointSlice",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"name": name, "resourceVersion": str(self._version), "labels": {LABEL: service}},
            "addressType": "IPv4",
            "endpoints": [_endpoint(address, ready) for address, ready in pods.items()] or None,
            "ports": [{"name": "metrics", "port": 9000, "protocol": "TCP"}, {"name": "http", "port": port}],
        }
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = piece
        await self._publish_event(kind, piece)

    async def delete(self, name: str) -> None:
        self._version += 1
        piece = self._slices.pop(name)
        piece["metadata"]["resourceVersion"] = str(self._version)
        await self._publish_event("DELETED", piece)

    async def bookmark(self) -> None:
        """Send a bookmark with a new resourceVersion, as after a change of an unrelated object."""
        self._version += 1
        piece = {
            "kind": "EndpointSlice",
            "metadata": {"resourceVersion": str(self._version), "creationTimestamp": None},
        }
        await self._publish_event("BOOKMARK", piece)

    async def compact(self, *, notify: bool = False) -> None:
        """Forget all earlier versions. With `notify`, running watches get a 410 as an ERROR event."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()
        if notify:
            await self._publish_event("ERROR", _status(410, "The resourceVersion for the provided watch is too old."))

    async def _publish_event(self, kind: str, piece: dict[str, Any]) -> None:
        async with self._changed:
            self._events.append((self._version, {"type": kind, "object": json.loads(json.dumps(piece))}))
            self._changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if request.transport is not None:
            self._transports.add(request.transport)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _refusal(401, "Unauthorized")
        if self.refusal is not None:
            return _refusal(*self.refusal)
        service = request.query["labelSelector"].removeprefix(f"{LABEL}=")
        return await self._watch(request, service) if "watch" in request.query else self._list(service)

    def _list(self, service: str) -> web.Response:
        self.num_lists += 1
        items = [piece for piece in self._slices.values() if piece["metadata"]["labels"][LABEL] == service]
        body = {
            "kind": "EndpointSliceList",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"resourceVersion": str(self._version)},
            "items": items or None,
        }
        return web.json_response(body)

    async def _watch(self, request: web.Request, service: str) -> web.StreamResponse:
        self.num_watches += 1
        version = int(request.query["resourceVersion"])
        if version < self._oldest:
            return _refusal(410, f"too old resource version: {version} ({self._oldest})")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        try:
            async with asyncio.timeout(self.watch_s):
                while True:
                    for number, event in [e for e in self._events if e[0] > version]:
                        version = number
                        if event["object"]["metadata"].get("labels", {LABEL: service})[LABEL] == service:
                            await response.write(json.dumps(event).encode() + b"\n")
                    async with self._changed:
                        await self._changed.wait()
        except TimeoutError:
            return response


def _endpoint(address: str, ready: bool | None) -> dict[str, Any]:
    name = f"pod-{address.rpartition('.')[2]}"
    return {
        "addresses": [address],
        "conditions": {} if ready is None else {"ready": ready, "serving": ready, "terminating": False},
        "targetRef": {"kind": "Pod", "namespace": "default", "name": name, "uid": name},
        "nodeName": "node",
    }


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}


def _refusal(code: int, message: str) -> web.Response:
    return web.json_response(_status(code, message), status=code)
