"""`Probes`: answers the kubelet. Alive: what must go round goes round. Ready: all that there is has been seen.

That the API server is away kills nobody: a restarted operator would find it no nearer.
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
    """What has to come by how often, in seconds, and when it last did."""

    clock: Callable[[], float] = time.monotonic
    is_ready: bool = False
    _expected: dict[str, tuple[Callable[[], float], float]] = field(default_factory=dict)

    def expect(self, what: str, last_s: Callable[[], float], *, within_s: float) -> None:
        self._expected[what] = (last_s, within_s)

    def trouble(self) -> str:
        """Empty if all is well."""
        ages = {what: (self.clock() - last_s(), within_s) for what, (last_s, within_s) in self._expected.items()}
        late = [f"{what} for {age_s:.0f} s" for what, (age_s, within_s) in ages.items() if age_s > within_s]
        return "; ".join(late)


@asynccontextmanager
async def serve_health(url: str, pulse: Liveness, telemetry: Telemetry) -> AsyncIterator[None]:
    """`url`: of the question whether it is alive; whether it is ready, at /readyz beside it, and /metrics."""

    async def alive(_: web.Request) -> web.Response:
        trouble = pulse.trouble()
        return web.Response(text=trouble or "ok", status=503 if trouble else 200)

    async def ready(_: web.Request) -> web.Response:
        text = "ok" if pulse.is_ready else "not all objects have been seen yet, or it is ending"
        return web.Response(text=text, status=200 if pulse.is_ready else 503)

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
