"""Router reports are published at once if they affect decisions; changes of the load alone at intervals."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from octavo_operator.cluster import reports as reports_module
from octavo_operator.cluster.reports import FRESH_S, LOAD_EVERY_S, Key, RouterReports
from octavo_testing.clock import Clock

POD: Key = ("default", "llm-router-0")
LIMIT_S = 120.0


class Router:
    """Sends the queued lines; None ends the connection."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, **event: Any) -> None:
        self.lines.put_nowait(b"data: " + json.dumps(event).encode() + b"\n\n")

    def change(self, *, waiting: int = 0, epoch: str | None = None) -> None:
        load = {"total_blocks": 100, "free_blocks": 100 - waiting, "cached_blocks": 0, "running": 0, "waiting": waiting}
        replica = {"name": "engine-0", "acknowledged_epoch": epoch, "models": ["llm"], "load": load}
        self.send(type="change", replicas=[replica], gone=[])

    async def respond(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.lines.get()) is not None:
            await response.write(line)
        return response


class Changes:
    def __init__(self) -> None:
        self.clock = Clock()
        self.queue: asyncio.Queue[Key] = asyncio.Queue()

    async def next_key(self) -> Key:
        async with asyncio.timeout(LIMIT_S):
            return await self.queue.get()


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
async def reports(router: Router, changes: Changes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RouterReports]:
    monkeypatch.setattr(reports_module, "RETRY_S", 0.0)
    app = web.Application()
    app.router.add_get("/state/events", router.respond)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        made = RouterReports(session, changes.queue.put_nowait, clock=changes.clock)
        made.subscribe(POD, ("127.0.0.1", server.port or 0))
        yield made
        await made.aclose()
        router.lines.put_nowait(None)


def _waiting(reports: RouterReports) -> int:
    return reports.for_pods("default", [POD[1]])[POD[1]].loads["engine-0"].waiting


async def test_an_admission_is_published_at_once(router: Router, reports: RouterReports, changes: Changes) -> None:
    router.change()
    assert await changes.next_key() == POD
    router.change(epoch="e1")
    await changes.next_key()
    assert reports.for_pods("default", [POD[1]])[POD[1]].admitted == {"engine-0": "e1"}


async def test_load_changes_are_published_at_intervals(
    router: Router, reports: RouterReports, changes: Changes
) -> None:
    router.change()
    await changes.next_key()
    for waiting in range(1, 5):
        router.change(waiting=waiting)
    router.change(waiting=4, epoch="e1")
    await changes.next_key()
    assert changes.queue.empty()
    router.change(waiting=5, epoch="e1")
    router.change(waiting=6, epoch="e1")
    async with asyncio.timeout(LIMIT_S):
        while _waiting(reports) != 6:
            await asyncio.sleep(0)
    assert changes.queue.empty()
    changes.clock.now_s += LOAD_EVERY_S
    router.send(type="heartbeat")
    await changes.next_key()
    assert changes.queue.empty()


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"strange": True}, "KeyError('state')"),
        ({"state": {"replicas": None}}, "TypeError("),
        ({"state": {"replicas": [{"name": "engine-0", "model": {"kv_bytes": 1}}]}}, "KeyError('max_model_len')"),
    ],
)
async def test_an_unknown_state_format_reconnects(
    router: Router, reports: RouterReports, changes: Changes, caplog: pytest.LogCaptureFixture, event: Any, error: str
) -> None:
    caplog.set_level("INFO")
    router.send(type="state", **event)
    router.lines.put_nowait(None)
    router.change(epoch="e1")
    await changes.next_key()
    assert error in caplog.text


async def test_a_state_of_many_replicas_is_read(router: Router, reports: RouterReports, changes: Changes) -> None:
    names = [f"engine-{i}" for i in range(1000)]
    router.send(type="state", state={"replicas": [{"name": name, "acknowledged_epoch": "x" * 300} for name in names]})
    await changes.next_key()
    assert len(reports.for_pods("default", [POD[1]])[POD[1]].admitted) == 1000


async def test_numbers_of_held_requests_are_published_at_intervals_and_their_models_at_once(
    router: Router, reports: RouterReports, changes: Changes
) -> None:
    router.change()
    await changes.next_key()
    router.send(type="change", held={"llm": 1}, requests={"llm": 1})
    await changes.next_key()
    router.send(type="change", held={"llm": 2}, requests={"llm": 2}, queue={"llm": 1})
    async with asyncio.timeout(LIMIT_S):
        while reports.for_pods("default", [POD[1]])[POD[1]].held != {"llm": 2}:
            await asyncio.sleep(0)
    assert changes.queue.empty()
    router.send(type="change", held={})
    await changes.next_key()


async def test_the_report_of_a_silent_router_is_not_fresh(
    router: Router, reports: RouterReports, changes: Changes
) -> None:
    router.change()
    await changes.next_key()
    changes.clock.now_s += FRESH_S
    assert [*reports.fresh("default", [POD[1]])] == [POD[1]]
    changes.clock.now_s += 0.1
    assert reports.fresh("default", [POD[1], "another"]) == {}
    router.send(type="heartbeat")
    async with asyncio.timeout(LIMIT_S):
        while not reports.fresh("default", [POD[1]]):
            await asyncio.sleep(0)
