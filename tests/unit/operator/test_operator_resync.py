"""Ghosts are forgotten, nothing is given out while in doubt, a deaf watch is started again; pulses and patience."""

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

LIMIT_S = 10.0


class FakeCluster:
    """What a cluster has, by uid; None: it can't be asked."""

    def __init__(self) -> None:
        self.there: set[str] | None = set()
        self.asked = 0

    async def list_uids(self, kind: str, namespace: str | None, *, label: str = "") -> set[str]:
        self.asked += 1
        if self.there is None:
            raise ApiError(404, "", "404 page not found")
        return self.there


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
        inventory = Inventory(cluster, self.view, kinds=["InferenceService"], namespaces=["a"], remove=remove)
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
        before = self.cluster.asked
        await eventually(lambda: self.cluster.asked > before + 1)

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


async def test_nothing_is_given_out_before_all_that_there_is_was_seen(parts: ResyncParts) -> None:
    parts.cluster.there = {"1", "2"}
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


async def test_ghosts_are_forgotten_before_anything_is_given_out(parts: ResyncParts) -> None:
    ghost, other = _service("ghost", "1"), _service("other", "2")
    async with parts.running():
        await eventually(parts.resync.is_synced.is_set)
        parts.view.update(ghost)
        parts.view.update(other)
        parts.cluster.there = {"2"}
        parts.resync.mark_stale()
        parts.queue.add(("default", "other"))
        await parts.next_key()
        assert list(parts.view.objects()) == [other]


async def test_a_deaf_watch_is_started_again_and_does_not_stop_work_for_ever(parts: ResyncParts) -> None:
    parts.cluster.there = {"1"}
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


async def test_a_kind_that_was_gone_is_watched_anew(parts: ResyncParts, caplog: pytest.LogCaptureFixture) -> None:
    parts.cluster.there = None
    async with parts.running():
        await parts.compared_again()
        parts.cluster.there = set()
        await eventually(lambda: parts.watches.restarts == 1)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "does not serve inferenceservices.serving.octavo.dev/v1alpha1 any more: install its CRD again" in messages[0]


async def test_whether_a_kind_is_served() -> None:
    cluster = FakeCluster()
    assert await is_served(cluster, "PodMonitor", None)
    cluster.there = None
    assert not await is_served(cluster, "PodMonitor", None)


def test_the_pulse_names_what_stands_still() -> None:
    clock, last = Clock(), Clock()
    liveness = Liveness(clock)
    liveness.expect("nobody has looked at the Lease", last, within_s=60)
    assert liveness.trouble() == ""
    clock.now_s = 61
    assert liveness.trouble() == "nobody has looked at the Lease for 61 s"
    last.now_s = 60
    assert liveness.trouble() == ""


async def test_the_kubelet_is_told_whether_it_is_alive_and_whether_it_is_ready() -> None:
    clock, url = Clock(), f"http://127.0.0.1:{free_port()}"
    liveness = Liveness(clock)
    liveness.expect("nobody has looked at the Lease", lambda: 0.0, within_s=60)

    async def answers(session: aiohttp.ClientSession) -> list[tuple[int, str]]:
        paths = ("/healthz", "/readyz")
        found = [await session.get(url + path) for path in paths]
        return [(answer.status, await answer.text()) for answer in found]

    async with serve_health(f"{url}/healthz", liveness, Telemetry()), aiohttp.ClientSession() as session:
        assert [status for status, _ in await answers(session)] == [200, 503]
        liveness.is_ready = True
        clock.now_s = 100
        assert await answers(session) == [(503, "nobody has looked at the Lease for 100 s"), (200, "ok")]


def test_watches_are_tried_for_ever_and_never_far_apart() -> None:
    pauses = list(islice(RetryForever(), 1000))
    assert max(pauses) == pauses[-1] == PAUSE_S
    assert sum(pauses[:5]) < 5


def test_the_same_outage_is_told_seldom() -> None:
    clock = Clock()
    rate_limit = RateLimitedLogFilter(every_s=30, clock=clock)
    record = logging.makeLogRecord({"levelno": logging.ERROR})
    assert [rate_limit.filter(record) for _ in range(3)] == [True, False, False]
    assert not rate_limit.filter(logging.makeLogRecord({"levelno": logging.INFO}))
    clock.now_s = 30
    assert rate_limit.filter(record)


async def test_after_a_long_outage_a_second_census_does_not_wait_for_long(parts: ResyncParts) -> None:
    """Only a census that takes long itself makes the next one later."""
    parts.cluster.there = None
    async with parts.running():
        await parts.compared_again()
        parts.clock.now_s += 3600
        parts.cluster.there = set()
        await eventually(parts.resync.is_synced.is_set)
        parts.cluster.there = {"1"}
        parts.resync.mark_stale()
        await parts.compared_again()


async def test_watches_that_take_long_but_go_on_telling_are_left_to_it(parts: ResyncParts) -> None:
    """Of 500 services there are thousands of objects: to begin anew in the middle would never come to an end."""
    count = 20
    parts.cluster.there = {str(i) for i in range(count)}
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
