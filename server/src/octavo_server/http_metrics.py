"""The `http_*` metrics, under the names, labels and buckets of prometheus_fastapi_instrumentator, as vLLM serves them.

The label `handler` is the template of the route, or "none" for a request without a route, so its values are bounded.
Sizes are the values of the Content-Length headers. Requests of probes, scrapers and routers aren't counted.
"""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNCOUNTED = frozenset({"/metrics", "/health", "/ready", "/load", "/ping", "/version", "/server_info", "/kv/events"})
NO_ROUTE = "none"
CLIENT_LEFT = 499  # status if the client disconnected before the response began
DURATION_S = (0.1, 0.5, 1)
DURATION_HIGHR_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60),
)


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "HTTP requests by handler, method and status.",
            ["handler", "status", "method"],
            registry=registry,
        )
        sizes = [
            Summary(f"http_{kind}_size_bytes", f"Content-Length of {kind}s.", ["handler"], registry=registry)
            for kind in ("request", "response")
        ]
        self._request_bytes, self._response_bytes = sizes
        self._all_durations = Histogram(
            "http_request_duration_highr_seconds",
            "Duration of HTTP requests, all handlers together.",
            registry=registry,
            buckets=DURATION_HIGHR_S,
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests by handler.",
            ["handler", "method"],
            registry=registry,
            buckets=DURATION_S,
        )

    def observe(
        self, *, handler: str, method: str, status: int, duration_s: float, request_bytes: int, response_bytes: int
    ) -> None:
        self._requests.labels(handler, f"{status // 100}xx", method).inc()
        self._request_bytes.labels(handler).observe(request_bytes)
        self._response_bytes.labels(handler).observe(response_bytes)
        self._all_durations.observe(duration_s)
        self._durations.labels(handler, method).observe(duration_s)

    def record_refused_head(self, method: str) -> None:
        """Count a request whose header lines are too large: the server refuses it before it reaches the ASGI app."""
        self.observe(handler=NO_ROUTE, method=method, status=431, duration_s=0.0, request_bytes=0, response_bytes=0)


class HttpMetricsMiddleware:
    """Pure ASGI: observes each request at the end of its response, which it forwards without buffering."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status, response_bytes = CLIENT_LEFT, 0

        async def send_and_observe(message: Message) -> None:
            nonlocal status, response_bytes
            if message["type"] == "http.response.start":
                status, response_bytes = message["status"], _content_length(message["headers"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_observe)
        except Exception:
            status = 500
            raise
        finally:
            handler = self._handler(scope)
            if handler not in UNCOUNTED:
                self._metrics.observe(
                    handler=handler,
                    method=scope["method"],
                    status=status,
                    duration_s=time.perf_counter() - started_s,
                    request_bytes=_content_length(scope["headers"]),
                    response_bytes=response_bytes,
                )

    def _handler(self, scope: Scope) -> str:
        """Template of the route, matched here if an inner layer (API keys, drain) responded before the routing."""
        route = scope.get("route")
        if route is None:
            route = next((r for r in self._routes if r.matches(scope)[0] is not Match.NONE), None)
        return getattr(route, "path", NO_ROUTE)


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    length = next((value for name, value in headers if name.lower() == b"content-length"), b"")
    return int(length) if length.isdigit() else 0
