"""Resync removes deleted objects, pauses the queue while the view is incomplete, and restarts stalled watches."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import aiohttp
import pytest
from octavo_operator import resync
from octavo_operator.cluster.client import ApiError
from octavo_operator.cluster.inventory import Inventory, is_served
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.view import Key, View
from octavo_operator.health import Liveness, serve_health
from octavo_operator.kopf_runner import PAUSE_S, RateLimitedLogFilter, RetryForever
from octavo_operator.metrics import Telemetry
from octavo_operator.resync import MAX_HOLD_S, STALLED_WATCH_S, Resync
from octavo_testing.clock import Clock
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.serve_command import free_port

LIMIT_S = 120.0


class FakeCluster:
    """The uids of a cluster's objects; None if the kind is not served."""

    def __init__(self) -> None:
        self.uids: set[str] | None = set()
        self.num_calls = 0

    async def list_uids(self, kind: str, namespace: str | None, *, label: str = "") -> set[str]:
        self.num_calls += 1
        if self.uids is None:
            raise ApiError(404, "", "404 page not found")
        return self.uids


class FakeRunner:
    def __init__(self) -> None:
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1


class ResyncParts:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("MIN_INTERVAL_S", "RETRY_S"):
            patch.setattr(resync, name, 0.001)
        self.cluster, self.view, self.queue = FakeCluster(), View(), WorkQueue[Key]()
        self.watches, self.clock = FakeRunner(), Clock()

        def remove(raw: Mapping[str, Any]) -> None:
            self.view.update(raw, is_gone=True)

        cluster: Any = self.cluster
        watches: Any = self.watches
        unused: Any = None
        inventory = Inventory(
            cluster,
            self.view,
            kinds=["InferenceService"],
            namespaces=["a"],
            remove=remove,
            mark_missing=lambda kind: False,
        )
        self.resync = Resync(
            inventory, self.view, self.queue, leadership=unused, watches=watches, on_requeue=unused, clock=self.clock
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.resync.compare_until_cancelled())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def compared_again(self) -> None:
        before = self.cluster.num_calls
        await eventually(lambda: self.cluster.num_calls > before + 1)

    async def next_key(self) -> Key:
        async with asyncio.timeout(LIMIT_S):
            return await self.queue.get()


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ResyncParts:
    return ResyncParts(monkeypatch)


def _service(name: str, uid: str) -> dict[str, Any]:
    raw = stored(Case("", {}, name=name))
    raw["metadata"]["uid"] = uid
    return raw


async def test_the_queue_is_paused_until_all_objects_are_seen(parts: ResyncParts) -> None:
    parts.cluster.uids = {"1", "2"}
    parts.view.update(_service("one", "1"))
    parts.queue.add(("default", "one"))
    async with parts.running():
        taking = asyncio.create_task(parts.next_key())
        await parts.compared_again()
        assert not taking.done()
        assert not parts.resync.is_synced.is_set()
        parts.view.update(_service("two", "2"))
        assert await taking == ("default", "one")
        assert parts.resync.is_synced.is_set()


async def test_deleted_objects_are_removed_before_the_queue_resumes(parts: ResyncParts) -> None:
    deleted, other = _service("deleted", "1"), _service("other", "2")
    async with parts.running():
        await eventually(parts.resync.is_synced.is_set)
        parts.view.update(deleted)
        parts.view.update(other)
        parts.cluster.uids = {"2"}
        parts.resync.mark_stale()
        parts.queue.add(("default", "other"))
        await parts.next_key()
        assert list(parts.view.objects()) == [other]


async def test_a_stalled_watch_restarts_and_the_queue_resumes(parts: ResyncParts) -> None:
    parts.cluster.uids = {"1"}
    parts.queue.add(("default", "other"))
    async with parts.running():
        await parts.compared_again()
        assert parts.watches.restarts == 0
        parts.clock.now_s += STALLED_WATCH_S + 1
        await eventually(lambda: parts.watches.restarts == 1)
        await parts.compared_again()
        assert parts.watches.restarts == 1
        parts.clock.now_s += MAX_HOLD_S
        assert await parts.next_key() == ("default", "other")


async def test_watches_restart_after_a_kind_was_gone(parts: ResyncParts, caplog: pytest.LogCaptureFixture) -> None:
    parts.cluster.uids = None
    async with parts.running():
        await parts.compared_again()
        parts.cluster.uids = set()
        await eventually(lambda: parts.watches.restarts == 1)
    (record,) = caplog.records
    assert "inferenceservices.serving.octavo.dev/v1alpha1" in record.getMessage()


async def test_is_served_distinguishes_missing_kinds() -> None:
    cluster = FakeCluster()
    assert await is_served(cluster, "PodMonitor", None)
    cluster.uids = None
    assert not await is_served(cluster, "PodMonitor", None)


def test_liveness_names_overdue_checks() -> None:
    clock, last = Clock(), Clock()
    liveness = Liveness(clock)
    liveness.expect("the Lease was not checked", last, within_s=60)
    assert liveness.trouble() == ""
    clock.now_s = 61
    assert liveness.trouble() == "the Lease was not checked for 61 s"
    last.now_s = 60
    assert liveness.trouble() == ""


async def test_liveness_and_readiness_are_served() -> None:
    clock, url = Clock(), f"http://127.0.0.1:{free_port()}"
    liveness = Liveness(clock)
    liveness.expect("the Lease was not checked", lambda: 0.0, within_s=60)

    async def answers(session: aiohttp.ClientSession) -> list[tuple[int, str]]:
        paths = ("/healthz", "/readyz")
        found = [await session.get(url + path) for path in paths]
        return [(answer.status, await answer.text()) for answer in found]

    async with serve_health(f"{url}/healthz", liveness, Telemetry()), aiohttp.ClientSession() as session:
        assert [status for status, _ in await answers(session)] == [200, 503]
        liveness.is_ready = True
        clock.now_s = 100
        assert await answers(session) == [(503, "the Lease was not checked for 100 s"), (200, "ok")]


def test_requests_are_retried_forever_at_short_intervals() -> None:
    pauses = list(islice(RetryForever(), 1000))
    assert max(pauses) == pauses[-1] == PAUSE_S
    assert sum(pauses[:5]) < 5


def test_repeated_warnings_are_rate_limited() -> None:
    clock = Clock()
    rate_limit = RateLimitedLogFilter(every_s=30, clock=clock)
    record = logging.makeLogRecord({"levelno": logging.ERROR})
    assert [rate_limit.filter(record) for _ in range(3)] == [True, False, False]
    assert not rate_limit.filter(logging.makeLogRecord({"levelno": logging.INFO}))
    clock.now_s = 30
    assert rate_limit.filter(record)


async def test_the_comparison_after_a_long_outage_is_not_delayed(parts: ResyncParts) -> None:
    """The delay depends on the duration of a comparison, not on the duration of the outage."""
    parts.cluster.uids = None
    async with parts.running():
        await parts.compared_again()
        parts.clock.now_s += 3600
        parts.cluster.uids = set()
        await eventually(parts.resync.is_synced.is_set)
        parts.cluster.uids = {"1"}
        parts.resync.mark_stale()
        await parts.compared_again()


async def test_slow_watches_that_make_progress_are_not_restarted(parts: ResyncParts) -> None:
    """A list of thousands of objects takes long: restarting the watches in between would never end."""
    count = 20
    parts.cluster.uids = {str(i) for i in range(count)}
    parts.queue.add(("default", "other"))
    async with parts.running():
        taking = asyncio.create_task(parts.next_key())
        for i in range(count - 1):
            parts.clock.now_s += STALLED_WATCH_S - 1
            parts.view.update(_service(f"s{i}", str(i)))
            await parts.compared_again()
        assert (parts.watches.restarts, taking.done()) == (0, False)
        parts.view.update(_service("last", str(count - 1)))
        await taking
