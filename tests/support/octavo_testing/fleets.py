"""Fleets over replicas that a test names, and a bounded wait for a condition."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from octavo_server.router.fleet.endpoint import StaticDiscovery
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.prefix_index import PrefixIndex

from octavo_testing.fake_replica import FakeReplica

LIMIT_S = 120.0
#: Short timeouts, so that a fault is detected soon.
QUICK = FollowSettings(
    answer_timeout_s=0.5, reopen_after_s=1.0, poll_every_s=0.02, polls_between_models=2,
    polls_between_metrics=1, least_wait_s=0.01, most_wait_s=0.05,
)  # fmt: skip


async def until(holds: Callable[[], object], *, limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds. The traceback of a timeout shows the condition."""
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def fleet_at(*urls: str, settings: FollowSettings | None = None) -> AsyncIterator[Fleet]:
    fleet = Fleet(settings or FollowSettings(), StaticDiscovery(urls), PrefixIndex(max_entries=100_000))
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


@asynccontextmanager
async def running_fleet(*fakes: FakeReplica, settings: FollowSettings = QUICK) -> AsyncIterator[Fleet]:
    """Start the replicas and a fleet over them; stop them all afterwards."""
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.stop)
        fleet = await stack.enter_async_context(fleet_at(*(fake.url for fake in fakes), settings=settings))
        yield fleet
