"""More connections than the process has file descriptors: it stays alive and serves again when they are closed."""

import asyncio
import resource
import time
from contextlib import AsyncExitStack, suppress

import httpx
import psutil
import pytest
from octavo_testing.attack_targets import AttackTarget, engine_target, router_target
from octavo_testing.raw_http import RawConnection
from octavo_testing.recording_replica import RecordingReplica

pytestmark = pytest.mark.slow

MAX_FILES = 256
NUM_CONNECTIONS = 1200
HELD_S = 3.0  # some periods of the tasks that run each second
UNFINISHED = {
    "head": b"GET /health HTTP/1.1\r\nHost: x\r\n",
    "body": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
}


@pytest.fixture(autouse=True)
def own_descriptors():
    """Let this process open all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * NUM_CONNECTIONS, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=["serve", "route"])
async def target(request, tmp_path):
    if request.param == "serve":
        started = engine_target(tmp_path, max_files=MAX_FILES)
    else:
        started = router_target(tmp_path, [RecordingReplica()], max_files=MAX_FILES)
    async with started as running:
        yield running


async def attack(target: AttackTarget, request: bytes) -> None:
    """Hold as many connections as possible with an unfinished request each, while the server's periodic tasks run."""
    async with AsyncExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            with suppress(ConnectionError):
                connection = await stack.enter_async_context(await RawConnection.open(target.port))
                await connection.send(request)
        deadline_s = time.monotonic() + HELD_S
        while time.monotonic() < deadline_s:
            assert target.process.status() != psutil.STATUS_ZOMBIE
            await asyncio.sleep(0.1)


async def is_healthy(port: int, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s), httpx.AsyncClient() as http:
        while True:
            try:
                if (await http.get(f"http://127.0.0.1:{port}/health", timeout=5)).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("request_part", UNFINISHED)
async def test_a_server_survives_more_connections_than_descriptors(target, request_part):
    for _ in range(2):
        await attack(target, UNFINISHED[request_part])
        await is_healthy(target.port, 60)
