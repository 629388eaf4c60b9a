"""A real router inside the test's event loop, over replicas at given addresses, on a free loopback port."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from octavo_server.router.app import Router, RouterServer
from octavo_server.router.fleet.endpoint import StaticDiscovery
from octavo_server.router.observe.workers import WorkerGroup
from octavo_server.router.settings import ForwardLimits, RouterSettings
from openai import AsyncOpenAI

from octavo_testing.fleets import until
from octavo_testing.server import MODEL, Served

#: What a client's requests reach: the server, or a router before it.
WAYS = ("server", "router")


class Routed:
    def __init__(self, url: str, router: Router, server: RouterServer, http: httpx.AsyncClient) -> None:
        self.url = url
        self.router = router
        self.server = server
        self.http = http
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)

    async def routable(self, model: str, count: int) -> None:
        await until(lambda: len(self.router.fleet.routable(model)) == count)


@asynccontextmanager
async def routing(
    *urls: str,
    forward: dict[str, Any] | None = None,
    tracer: Any = None,
    group: WorkerGroup | None = None,
    **settings: Any,
) -> AsyncIterator[Routed]:
    """Run a router. An `admin_port` of any value gives it a free admin port. `group`: it is one worker of a router."""
    sockets = [socket.socket(proto=socket.IPPROTO_TCP) for _ in range(2 if "admin_port" in settings else 1)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    urls_here = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    if "admin_port" in settings:
        settings["admin_port"] = sockets[1].getsockname()[1]
    limits = ForwardLimits(**{"max_hold_time": 10.0, "connect_timeout": 5.0, **(forward or {})})
    router_settings = RouterSettings(**{"drain_timeout": 5.0, "routing_headers": True, "forward": limits, **settings})
    router = Router(router_settings, StaticDiscovery(urls), group, tracer)
    server = RouterServer(router)
    await router.start()
    running = asyncio.create_task(server.serve(sockets=sockets))
    try:
        await until(lambda: server.started)
        async with httpx.AsyncClient(base_url=urls_here[0], timeout=240) as http:
            yield Routed(urls_here[0], router, server, http)
    finally:
        server.should_exit = True
        await running
        await router.stop()


@asynccontextmanager
async def reaching(server: Served, way: str) -> AsyncIterator[Served | Routed]:
    """Yield what clients reach by one of `WAYS`."""
    if way == "server":
        yield server
        return
    async with routing(server.url) as routed:
        await routed.routable(MODEL, 1)
        yield routed
