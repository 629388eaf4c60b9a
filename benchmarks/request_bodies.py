"""Cost of hostile request bodies for a server: pauses of the event loop, and memory.

Each shape of `octavo_testing.hostile_bodies` is sent to the server of a scripted engine and to a router in front of it;
each server is a process that reports on itself. A pause of the event loop counts only as far as the process used the
CPU in it, so that other processes on the machine don't count. The bound of a pause is 100 ms, or three times msgspec's
time to decode the body; memory may grow by eight times the body plus 32 MiB.
"""

import argparse
import asyncio
import gc
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import support_path  # noqa: F401  (makes octavo_testing importable)
from octavo_testing.hostile_bodies import SHAPES, hostile_body
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from table import print_table

MIB = 2**20
MAX_STALL_MS, TIMES_MSGSPEC = 100.0, 3.0
TIMES_BODY, MORE_BYTES = 8, 32 * MIB
TICK_S = 0.001


class LoopWatch:
    """`worst_s` is the longest pause between two turns of the event loop since the last reset."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(TICK_S)
            now, used = time.perf_counter(), time.process_time()
            self.worst_s = max(self.worst_s, min(now - wall, used - cpu))
            wall, cpu = now, used


def resident(field: str) -> int:
    """Return `VmRSS` or `VmHWM` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


async def report(command: str, watch: LoopWatch) -> dict[str, float]:
    if command == "reset":
        gc.collect()
        await asyncio.sleep(5 * TICK_S)  # the pause of this collection is over then
        Path("/proc/self/clear_refs").write_text("5")
        watch.worst_s = 0.0
    return {"rss": resident("VmRSS"), "peak": resident("VmHWM"), "stall_s": watch.worst_s}


async def serve(role: str, upstream: str) -> None:
    watch, loop = LoopWatch(), asyncio.get_running_loop()
    async with _server(role, upstream) as url:
        watching = asyncio.create_task(watch.run())
        print(json.dumps({"url": url}), flush=True)
        while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            print(json.dumps(await report(command, watch)), flush=True)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


@asynccontextmanager
async def _server(role: str, upstream: str) -> AsyncIterator[str]:
    if role == "router":
        async with routing(upstream) as routed:
            await routed.routable(MODEL, 1)
            yield routed.url
        return
    with tempfile.TemporaryDirectory() as folder:
        async with serving(ScriptedClient(write_byte_model(Path(folder)), max_model_len=131_072)) as served:
            yield served.url


class Server:
    """A process that runs `serve`."""

    def __init__(self, role: str, upstream: str = "") -> None:
        command = [sys.executable, __file__, "--role", role, "--upstream", upstream]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = str(self._line()["url"])

    def ask(self, command: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self._process.communicate("\n")

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line: dict[str, Any] = json.loads(self._process.stdout.readline())
        return line


def post(url: str, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def decode_s(body: bytes) -> float:
    times = []
    for _ in range(3):
        start = time.thread_time()
        with suppress(msgspec.DecodeError, RecursionError):
            msgspec.json.decode(body)
        times.append(time.thread_time() - start)
    return min(times)


def measure(server: Server, name: str, num_bytes: int, times: int) -> list[object]:
    path, body = hostile_body(name, num_bytes)
    bound_ms = max(MAX_STALL_MS, TIMES_MSGSPEC * decode_s(body) * 1e3)
    stalls_ms, grown, left, status = [], [], [], 0
    for _ in range(times):
        before = server.ask("reset")
        status = post(server.url, path, body)
        after = server.ask("read")
        stalls_ms.append(after["stall_s"] * 1e3)
        grown.append(after["peak"] - before["rss"])
        left.append(server.ask("reset")["rss"] - before["rss"])
    stall_ms, bytes_grown = sorted(stalls_ms)[len(stalls_ms) // 2], max(grown)
    is_within = stall_ms <= bound_ms and bytes_grown <= TIMES_BODY * len(body) + MORE_BYTES
    sizes = (f"{size / MIB:.1f}" for size in (len(body), bytes_grown, left[-1]))
    return [name, status, *sizes, f"{stall_ms:.0f}", f"{bound_ms:.0f}", "" if is_within else "beyond"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 1.0, 4.0], help="Sizes of bodies in MiB.")
    parser.add_argument("--times", type=int, default=3, help="Requests for each figure.")
    parser.add_argument("--only", nargs="*", default=[], help="Names of shapes. Default: all.")
    parser.add_argument("--role", choices=["engine", "router"], help=argparse.SUPPRESS)
    parser.add_argument("--upstream", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        asyncio.run(serve(args.role, args.upstream))
        return
    engine = Server("engine")
    router = Server("router", engine.url)
    header = ["shape", "status", "MiB", "grown MiB", "left MiB", "stall ms", "bound ms", ""]
    for mib in args.mib:
        for role, server in (("engine", engine), ("router", router)):
            names = args.only or SHAPES
            rows = [measure(server, name, int(mib * MIB), args.times) for name in names]
            print_table(f"{role}, bodies of {mib:g} MiB", header, rows)
    router.close()
    engine.close()


if __name__ == "__main__":
    main()
