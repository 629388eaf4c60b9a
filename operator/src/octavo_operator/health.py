"""Serves the kubelet's probes and the metrics: /healthz (the periodic tasks run), /readyz (the view is complete).

The operator stays alive while the API server is away: a restart would not help.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import web

from octavo_operator.metrics import Telemetry


@dataclass(slots=True)
class Liveness:
    """State of the operator for the probes. Each periodic task has the time of its last run and an age limit in
    seconds."""

    clock: Callable[[], float] = time.monotonic
    is_ready: bool = False
    _expected: dict[str, tuple[Callable[[], float], float]] = field(default_factory=dict)

    def expect(self, complaint: str, last_s: Callable[[], float], *, within_s: float) -> None:
        self._expected[complaint] = (last_s, within_s)

    def trouble(self) -> str:
        """Return a complaint about each task whose last run is older than its limit; empty if there is none."""
        ages = {text: (self.clock() - last_s(), within_s) for text, (last_s, within_s) in self._expected.items()}
        late = [f"{text} for {age_s:.0f} s" for text, (age_s, within_s) in ages.items() if age_s > within_s]
        return "; ".join(late)


@asynccontextmanager
async def serve_health(url: str, liveness: Liveness, telemetry: Telemetry) -> AsyncIterator[None]:
    """Serve the liveness probe at `url`, and /readyz and /metrics on the same port."""

    async def alive(_: web.Request) -> web.Response:
        trouble = liveness.trouble()
        return web.Response(text=trouble or "ok", status=503 if trouble else 200)

    async def ready(_: web.Request) -> web.Response:
        text = "ok" if liveness.is_ready else "the operator has not seen all objects yet, or is shutting down"
        return web.Response(text=text, status=200 if liveness.is_ready else 503)

    where = urlsplit(url)
    app = web.Application()
    routes = {where.path or "/healthz": alive, "/readyz": ready, "/metrics": telemetry.respond}
    app.add_routes([web.get(path, respond) for path, respond in routes.items()])
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, where.hostname, where.port).start()
        yield
    finally:
        await runner.cleanup()
