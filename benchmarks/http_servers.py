"""Compare HTTP servers for the router: the same proxy on uvicorn and on aiohttp.web, under load from wrk.

Each proxy reads a small JSON body, forwards it to nginx over the router's own upstream connections and returns the
response, so that only the server differs. `asgi` is uvicorn with `TimeoutProtocol` around a bare ASGI callable, as in
the router; `aiohttp` is `aiohttp.web` around a low-level handler. The servers take turns; CPU time is the process's.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiohttp import web
from dev_packages import psutil
from octavo_server.config import HttpSettings
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.responses import InFlight
from octavo_server.http.server import DrainingServer
from octavo_server.router.upstream.headers import NOT_FORWARDED, Headers, request_head, response_headers
from octavo_server.router.upstream.pool import ConnectionPools
from router_latency import CONNECTIONS, Reading, free_ports, running, write_nginx, wrk
from table import Samples, print_table, save_json

SERVERS = ("asgi", "aiohttp")
LIMIT_S = 30.0
MAX_BODY_BYTES = 4 * 1024 * 1024


class EchoProxy:
    """Forwards a body to one replica, for both servers."""

    def __init__(self, upstream_url: str) -> None:
        self._pool = ConnectionPools(connect_timeout_s=2.0).pool(upstream_url)

    async def forward(self, target: bytes, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        json.loads(body)
        head = request_head(target, headers, self._pool.host, len(body), without=NOT_FORWARDED, extra=b"")
        response = await self._pool.send(head + body, LIMIT_S)
        await response.wait_complete()
        answer = response.take_chunks()
        found = response_headers(response.status, response.headers, whole_bytes=len(answer), keeps_own=False)
        return response.status, found, answer


async def serve_asgi(proxy: EchoProxy, port: int) -> None:
    async def app(
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Mapping[str, Any]]],
        send: Callable[[Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        status, headers, answer = await proxy.forward(scope["raw_path"], scope["headers"], body)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    settings = HttpSettings(logs_access=False)
    lifecycle = Lifecycle(InFlight(), timeout_s=1.0)
    more: dict[str, Any] = {"interface": "asgi3", "proxy_headers": False, "host": "127.0.0.1", "port": port}
    await DrainingServer(app, settings, lifecycle, on_refused_head=print, **more).serve()  # type: ignore[arg-type]


async def serve_aiohttp(proxy: EchoProxy, port: int) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        body = await request.read()
        headers = [(name.lower(), value) for name, value in request.raw_headers]
        status, found, answer = await proxy.forward(request.raw_path.encode(), headers, body)
        shown = {name.decode(): value.decode("latin-1") for name, value in found}
        return web.Response(status=status, headers=shown, body=answer)

    server = web.Server(handle, access_log=None, client_max_size=MAX_BODY_BYTES)
    runner = web.ServerRunner(server, handle_signals=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def serve(kind: str, port: int, upstream_url: str) -> None:
    async def run() -> None:
        await (serve_asgi if kind == "asgi" else serve_aiohttp)(EchoProxy(upstream_url), port)

    asyncio.run(run())


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[int, list[Reading]]]:
    ports = free_ports(2 + len(SERVERS))
    async with AsyncExitStack() as stack:
        nginx = write_nginx(folder, ports[:2], ports[:2])
        await stack.enter_async_context(running(nginx, ports[0], folder / "nginx.out"))
        processes: dict[str, tuple[int, psutil.Process | None]] = {"direct": (ports[0], None)}
        for kind, port in zip(SERVERS, ports[2:], strict=True):
            command = [sys.executable, __file__, "--serve", kind, str(port), f"http://127.0.0.1:{ports[0]}"]
            process = await stack.enter_async_context(running(command, port, folder / f"{kind}.log"))
            processes[kind] = port, process
        readings: dict[str, dict[int, list[Reading]]] = {name: {c: [] for c in CONNECTIONS} for name in processes}
        for _ in range(arguments.repetitions):
            for connections in CONNECTIONS:
                for name, (port, process) in processes.items():
                    readings[name][connections].append(await wrk(port, connections, arguments.seconds, process))
        return readings


def report(readings: dict[str, dict[int, list[Reading]]], path: Path | None) -> None:
    rows, figures = [], {}
    for name, by_connections in readings.items():
        one, many = by_connections[1], by_connections[32]
        rate = Samples(tuple(r.rate for r in many))
        p50 = Samples(tuple(r.p50_ms for r in one))
        cpu = Samples(tuple(r.cpu_us for r in many))
        failed = sum(r.num_failed for r in (*one, *many))
        rows.append((name, rate, p50, cpu, failed))
        figures[name] = {"rate": rate, "p50_ms": p50, "cpu_us": cpu, "failed": failed}
    header = ("server", "requests/s at 32", "p50 ms at 1", "CPU us/request", "failed")
    print_table("median [min, max]", header, rows)
    save_json(path, figures)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare uvicorn with aiohttp.web as the router's HTTP server.")
    parser.add_argument("--seconds", type=int, default=3, help="seconds of one reading. Default: 3")
    parser.add_argument("--repetitions", type=int, default=5, help="readings of each figure. Default: 5")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--serve", nargs=3, metavar=("KIND", "PORT", "UPSTREAM"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        kind, port, upstream_url = arguments.serve
        serve(kind, int(port), upstream_url)
        return
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        report(asyncio.run(measure(arguments, Path(folder))), arguments.json)


if __name__ == "__main__":
    main()
