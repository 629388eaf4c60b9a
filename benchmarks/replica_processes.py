"""The processes of `router_replicas.py`: engines with one thread each, and the routers in front of them."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from octavo_server.http.listener import LOOPBACK, ReservedPorts
from octavo_server.up.child import COMMAND

START_TIMEOUT_S = 180
OCTAVO = (*COMMAND, str(os.getpid()))  # the process ends when this one ends, even by SIGKILL


@asynccontextmanager
async def running(command: Sequence[str], url: str, log: Path, *, ready: str = "/ready") -> AsyncIterator[str]:
    """Run a server, yield its address when it is ready, and end it afterwards."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_TIMEOUT_S):
            while not await _answers(session, url + ready):
                if process.returncode is not None:
                    raise RuntimeError(f"{command[0]} ended; its log:\n{log.read_text()[-3000:]}")
                await asyncio.sleep(0.1)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def start_engines(stack: AsyncExitStack, model: str, flags: Sequence[str], num: int, folder: Path) -> list[str]:
    """Start the engines one by one: the first compiles and measures, and the others use its results."""
    ports = stack.enter_context(ReservedPorts())

    async def start(position: int) -> str:
        port = ports.reserve(LOOPBACK, 0)
        command = (*OCTAVO, "serve", model, "--host", LOOPBACK, "--port", str(port), "--num-threads", "1", *flags)
        url = f"http://{LOOPBACK}:{port}"
        return await stack.enter_async_context(running(command, url, folder / f"engine-{position}.log"))

    return [await start(position) for position in range(num)]


@asynccontextmanager
async def octavo_router(replicas: Sequence[str], log: Path) -> AsyncIterator[str]:
    """Run a router, and yield its address when it has admitted every replica."""
    with ReservedPorts() as ports:
        port = ports.reserve(LOOPBACK, 0)
        command = [*OCTAVO, "route", "--host", LOOPBACK, "--port", str(port), "--disable-uvicorn-access-log"]
        for replica in replicas:
            command += ["--replica", replica]
        async with running(command, f"http://{LOOPBACK}:{port}", log) as url:
            async with aiohttp.ClientSession() as session, asyncio.timeout(START_TIMEOUT_S):
                while f"\noctavo_router_endpoints_admitted {len(replicas)}\n" not in await _metrics(session, url):
                    await asyncio.sleep(0.1)
            yield url


async def _metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as answer:
        return await answer.text()


@asynccontextmanager
async def sglang_router(python: Path, replicas: Sequence[str], log: Path) -> AsyncIterator[str]:
    """Run sglang-router with its policy `cache_aware` and default settings."""
    with ReservedPorts() as ports:
        port = ports.reserve(LOOPBACK, 0)
        launch = (str(python), "-m", "sglang_router.launch_router", "--policy", "cache_aware", "--log-level", "warn")
        command = (*launch, "--host", LOOPBACK, "--port", str(port), "--worker-urls", *replicas)
        async with running(command, f"http://{LOOPBACK}:{port}", log, ready="/readiness") as url:
            yield url
