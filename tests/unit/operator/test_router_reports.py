"""Router reports are published at once if they affect decisions; changes of the load alone at intervals."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from octavo_operator.cluster.reports import (
    BURST_S,
    CHANGES_BURST,
    FRESH_S,
    LAST_RETRY_S,
    LOAD_EVERY_S,
    MAX_EVENTS_S,
    RETRY_S,
    EventBudget,
    Key,
    RouterReports,
    router_session,
    split_events,
)
from octavo_operator.cluster.router_state import LONGEST_TEXT, MAX_MISSING, MAX_NAMES, RouterState
from octavo_operator.observed import AdapterReport
from octavo_server.kv.frames import AdapterFile, ReplicaLoad
from octavo_server.router.observe.state import ModelSize, ReplicaState
from octavo_server.router.observe.state_stream import Change
from octavo_testing.clock import Clock

POD: Key = ("default", "llm-router-0")
LIMIT_S = 120.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """Sends the queued lines; None ends the connection."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.requests: list[web.Request] = []

    def send(self, **event: Any) -> None:
        self.lines.put_nowait(b"data: " + json.dumps(event).encode() + b"\n\n")

    def change(self, *, waiting: int = 0, epoch: str | None = None) -> None:
        load = {"total_blocks": 100, "free_blocks": 100 - waiting, "cached_blocks": 0, "running": 0, "waiting": waiting}
        replica = {"name": "engine-0", "acknowledged_epoch": epoch, "models": ["llm"], "load": load}
        self.send(type="change", replicas=[replica], gone=[])

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.lines.get()) is not None:
            await response.write(line)
        return response


class Operator:
    """The reports' surroundings: engine pods of the view, clock, changes, and pauses, which end at once."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engines = {"engine-0"}
        self.pauses: asyncio.Queue[float] = asyncio.Queue()
        self.changes: asyncio.Queue[Key] = asyncio.Queue()

    def reports(self, session: aiohttp.ClientSession) -> RouterReports:
        return RouterReports(
            session, self.changes.put_nowait, engines_of=lambda _: self.engines, clock=self.clock, pause=self._pause
        )

    async def _pause(self, delay_s: float) -> None:
        self.pauses.put_nowait(delay_s)
        await asyncio.sleep(0)

    async def next_change(self) -> Key:
        async with asyncio.timeout(LIMIT_S):
            return await self.changes.get()

    async def next_pause(self) -> float:
        async with asyncio.timeout(LIMIT_S):
            return await self.pauses.get()


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def operator() -> Operator:
    return Operator()


@asynccontextmanager
async def _reading(operator: Operator, respond: Handler, pods: Sequence[Key] = (POD,)) -> AsyncIterator[RouterReports]:
    """Reports of pods that all have the same answer, on any path."""
    app = web.Application()
    app.router.add_get("/{path:.*}", respond)
    async with TestServer(app) as server, router_session() as session:
        reports = operator.reports(session)
        for pod in pods:
            reports.subscribe(pod, ("127.0.0.1", server.port or 0), ("admin", "shared"))
        yield reports
        await reports.aclose()


@pytest.fixture
async def reports(router: Router, operator: Operator) -> AsyncIterator[RouterReports]:
    async with _reading(operator, router.respond) as made:
        yield made
        router.lines.put_nowait(None)


def _waiting(reports: RouterReports) -> int:
    return reports.for_pods("default", [POD[1]])[POD[1]].loads["engine-0"].waiting


async def test_an_admission_is_published_at_once(router: Router, reports: RouterReports, operator: Operator) -> None:
    router.change()
    assert await operator.next_change() == POD
    router.change(epoch="e1")
    await operator.next_change()
    assert reports.for_pods("default", [POD[1]])[POD[1]].admitted == {"engine-0": "e1"}


async def test_a_router_that_changes_always_gets_one_publication_a_second(
    router: Router, reports: RouterReports, operator: Operator
) -> None:
    """Each one queues a reconcile of every service behind the router. The last change is never lost."""
    for number in range(400):  # below MAX_EVENTS_S, as a hostile router would send
        operator.clock.now_s += 0.025
        router.change(epoch=f"e{number}")
        await _until_epoch(reports, f"e{number}")
    assert operator.changes.qsize() <= CHANGES_BURST + 10
    while not operator.changes.empty():
        operator.changes.get_nowait()
    operator.clock.now_s += 1
    router.lines.put_nowait(b": alive\n\n")
    await operator.next_change()
    assert reports.for_pods("default", [POD[1]])[POD[1]].admitted == {"engine-0": "e399"}


async def test_held_requests_are_published_at_once(router: Router, reports: RouterReports, operator: Operator) -> None:
    """A model that sleeps is woken by them, also while replicas change all the time."""
    for number in range(50):
        router.change(epoch=f"e{number}")
        await _until_epoch(reports, f"e{number}")
    assert operator.changes.qsize() == CHANGES_BURST
    router.send(type="change", replicas=[], gone=[], held={"llm": 1})
    for _ in range(CHANGES_BURST + 1):
        await operator.next_change()
    router.send(type="change", replicas=[], gone=[], held={"llm": 2})
    router.change(epoch="last")
    await _until_epoch(reports, "last")
    assert operator.changes.empty()


async def _until_epoch(reports: RouterReports, epoch: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (found := reports.for_pods("default", [POD[1]])) == {} or epoch not in found[POD[1]].admitted.values():
            await asyncio.sleep(0)


async def test_load_changes_are_published_at_intervals(
    router: Router, reports: RouterReports, operator: Operator
) -> None:
    router.change()
    await operator.next_change()
    for waiting in range(1, 5):
        router.change(waiting=waiting)
    router.change(waiting=4, epoch="e1")
    await operator.next_change()
    assert operator.changes.empty()
    router.change(waiting=5, epoch="e1")
    router.change(waiting=6, epoch="e1")
    async with asyncio.timeout(LIMIT_S):
        while _waiting(reports) != 6:
            await asyncio.sleep(0)
    assert operator.changes.empty()
    operator.clock.now_s += LOAD_EVERY_S
    router.send(type="heartbeat")
    await operator.next_change()
    assert operator.changes.empty()


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"strange": True}, "state"),
        ({"state": {"replicas": None}}, "state.replicas"),
        ({"state": {"replicas": [{"name": "engine-0", "model": {"kv_bytes": 1}}]}}, "max_model_len"),
    ],
)
async def test_an_unknown_state_format_reconnects(
    router: Router, reports: RouterReports, operator: Operator, caplog: pytest.LogCaptureFixture, event: Any, error: str
) -> None:
    caplog.set_level("INFO")
    router.send(type="state", **event)
    router.lines.put_nowait(None)
    router.change(epoch="e1")
    await operator.next_change()
    assert error in caplog.text


async def test_a_state_of_many_replicas_is_read(router: Router, reports: RouterReports, operator: Operator) -> None:
    names = [f"engine-{i}" for i in range(1000)]
    operator.engines = {*names}
    replicas = [{"name": name, "acknowledged_epoch": "1", "why": "x" * 1000} for name in names]
    router.send(type="state", state={"replicas": replicas})
    await operator.next_change()
    assert len(reports.for_pods("default", [POD[1]])[POD[1]].admitted) == 1000


async def test_numbers_of_held_requests_are_published_at_intervals_and_their_models_at_once(
    router: Router, reports: RouterReports, operator: Operator
) -> None:
    router.change()
    await operator.next_change()
    router.send(type="change", held={"llm": 1}, requests={"llm": 1})
    await operator.next_change()
    router.send(type="change", held={"llm": 2}, requests={"llm": 2}, queue={"llm": 1})
    async with asyncio.timeout(LIMIT_S):
        while reports.for_pods("default", [POD[1]])[POD[1]].held != {"llm": 2}:
            await asyncio.sleep(0)
    assert operator.changes.empty()
    router.send(type="change", held={})
    await operator.next_change()


async def test_the_report_of_a_silent_router_is_not_fresh(
    router: Router, reports: RouterReports, operator: Operator
) -> None:
    router.change()
    await operator.next_change()
    operator.clock.now_s += FRESH_S
    assert [*reports.fresh("default", [POD[1]])] == [POD[1]]
    operator.clock.now_s += 0.1
    assert reports.fresh("default", [POD[1], "another"]) == {}
    router.send(type="heartbeat")
    async with asyncio.timeout(LIMIT_S):
        while not reports.fresh("default", [POD[1]]):
            await asyncio.sleep(0)


async def test_a_redirect_is_an_error_and_is_not_followed(operator: Operator, caplog: pytest.LogCaptureFixture) -> None:
    """A tenant's router could send the operator, and the secret, to any address that the operator can reach."""
    paths: list[str] = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async with _reading(operator, redirect):
        assert [await operator.next_pause() for _ in range(2)] == [RETRY_S, 2 * RETRY_S]
    assert {*paths} == {"/state/events"}
    assert caplog.text.count("302") == 1


async def test_no_compression_is_asked_for_or_undone(
    router: Router, reports: RouterReports, operator: Operator
) -> None:
    router.change()
    await operator.next_change()
    (request,) = router.requests
    assert (request.headers["Accept-Encoding"], request.headers["x-octavo-secret"]) == ("identity", "admin")
    assert not reports._session.auto_decompress


async def test_a_router_of_an_older_version_is_read_with_the_secret_that_engines_have(operator: Operator) -> None:
    """It knows no other secret. Its next connection begins with the one that it took."""
    sent: list[str] = []

    async def respond(request: web.Request) -> web.StreamResponse:
        sent.append(request.headers["x-octavo-secret"])
        if sent[-1] != "shared":
            raise web.HTTPUnauthorized
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"type": "state", "state": {}}\n\n')
        return response

    async with _reading(operator, respond):
        assert await operator.next_change() == POD
        await operator.next_change()
        await operator.next_change()
    assert sent[:3] == ["admin", "shared", "shared"]


async def test_a_router_is_not_asked_without_a_pause_if_it_takes_no_secret(operator: Operator) -> None:
    sent: list[str] = []

    async def refuse(request: web.Request) -> web.StreamResponse:
        sent.append(request.headers["x-octavo-secret"])
        raise web.HTTPUnauthorized

    async with _reading(operator, refuse):
        assert [await operator.next_pause() for _ in range(3)] == [RETRY_S] * 3
    assert sent[:3] == ["admin", "shared", "admin"]


async def test_one_operator_reads_130_routers(operator: Operator) -> None:
    """All at the same time: no stream ends before all have been read."""
    pods, is_over = [("default", f"router-{i}") for i in range(130)], asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"type": "state", "state": {}}\n\n')
        await is_over.wait()
        return response

    async with _reading(operator, respond, pods) as reports:
        assert {await operator.next_change() for _ in pods} == {*pods}
        assert len(reports.for_pods("default", [name for _, name in pods])) == 130
        is_over.set()


async def test_only_pods_of_the_view_are_reported(router: Router, reports: RouterReports, operator: Operator) -> None:
    """A report may arrive before the pod's watch event, and the router does not repeat it."""
    epochs = {"engine-0": "e0", "engine-1": "e1", "another-service": "e2"}
    router.send(type="state", state={"replicas": [{"name": n, "acknowledged_epoch": e} for n, e in epochs.items()]})
    await operator.next_change()
    assert reports.for_pods("default", [POD[1]])[POD[1]].admitted == {"engine-0": "e0"}
    operator.engines.add("engine-1")
    assert reports.for_pods("default", [POD[1]])[POD[1]].admitted == {"engine-0": "e0", "engine-1": "e1"}


@pytest.mark.parametrize(
    "figures",
    [
        '"held": {"m": "x"}',
        '"held": {"m": -1}',
        '"held": {"m": Infinity}',
        '"requests": {"m": 1e400}',
        '"queue": {"m": 1.5}',
        '"queue": {"m": 9007199254740993}',
        '"queue": [1]',
        '"replicas": [{"name": "a", "in_flight": "x"}]',
        '"replicas": [{"name": "a", "in_flight": -1}]',
        '"replicas": [{"name": "a", "load": {"running": "1"}}]',
        '"replicas": [{"name": "a", "model": {"max_model_len": "x", "weights_bytes": [1]}}]',
        '"replicas": [{"name": "a", "startup_s": {"import": "2"}}]',
        '"replicas": [{"name": "a", "acknowledged_epoch": 1}]',
        '"replicas": [{"name": "a", "adapter_file": {"missing": {}}}]',
        '"replicas": [{"name": "a", "adapter_file": {"digest": "1", "missing": {"x": 1}}}]',
        '"replicas": [{"name": 1}]',
        '"replicas": [{}]',
        '"replicas": [{"name": "a", "startup_s": {"import": NaN}}]',
        f'"replicas": [{{"name": "{"a" * 254}"}}]',
        f'"unknown": {"[" * 100_000}{"]" * 100_000}',
        '"gone": {}',
    ],
    ids=lambda figures: figures[:80],
)
def test_wrong_types_are_refused(figures: str) -> None:
    with pytest.raises(ValueError, match="unknown format"):
        RouterState("router").update(f'{{"type": "change", {figures}}}'.encode(), 0.0)


def test_impossible_figures_of_an_engine_are_left_out() -> None:
    """A shared router passes on the figures of all engines: those of one may not spoil the report of the others."""
    size = {"max_model_len": 1, "weights_bytes": 1, "kv_bytes": 1, "kv_tokens": 1}
    replicas = [
        {"name": "a", "acknowledged_epoch": "e", "load": {"running": -1}, "model": size | {"kv_bytes": 10**30}},
        {"name": "b", "load": {"total_blocks": 10, "free_blocks": 11}, "model": size, "revision": "r" * 10_000},
    ]
    state = RouterState("router")
    state.update(json.dumps({"type": "state", "state": {"replicas": replicas}}).encode(), 0.0)
    report = state.report({"a", "b"})
    assert (report.admitted, report.loads.keys(), report.sizes.keys()) == ({"a": "e"}, {"b"}, {"b"})
    assert (report.loads["b"].num_used_blocks, report.revisions) == (0, {})


def test_the_list_of_adapters_that_a_replica_follows_is_decisive_and_bounded() -> None:
    state = RouterState("router")

    def change(**file: Any) -> str | None:
        replica = {"name": "a", "adapters": ["x"], "adapter_file": file or None}
        return state.update(json.dumps({"type": "change", "replicas": [replica]}).encode(), 0.0)

    assert (change(), dict(state.report({"a"}).adapters)) == ("replicas", {})
    assert change(digest="1", missing={"x": ""}) == "replicas"
    assert change(digest="1", missing={"x": ""}) == "numbers"
    assert state.report({"a"}).adapters == {"a": AdapterReport("1", {"x": ""})}
    change(digest="d" * 10_000, missing={f"{i:<{10_000}}": "why" * 1000 for i in range(2 * MAX_MISSING)})
    report = state.report({"a"}).adapters["a"]
    assert (len(report.digest), len(report.missing)) == (LONGEST_TEXT, MAX_MISSING)
    assert {len(text) for entry in report.missing.items() for text in entry} == {LONGEST_TEXT}


def test_a_change_leaves_the_other_names_alone() -> None:
    state, names = RouterState("router"), {"a", "b"}
    state.update(b'{"type": "change", "replicas": [{"name": "a"}, {"name": "b"}]}', 1.0)
    before = state.report(names)
    assert state.report(names) is before
    state.update(b'{"type": "change", "replicas": [{"name": "a", "load": {"running": 1}}]}', 2.0)
    after = state.report(names)
    assert after.loads["a"] != before.loads["a"]
    assert after.loads["b"] is before.loads["b"]
    assert after.load_times == {"a": 2.0, "b": 1.0}


def test_a_router_may_report_a_limited_number_of_names() -> None:
    state = RouterState("router")

    def change(first: int, number: int) -> bytes:
        replicas = [{"name": f"engine-{i}"} for i in range(first, first + number)]
        return json.dumps({"type": "change", "replicas": replicas}).encode()

    state.update(change(0, MAX_NAMES), 0.0)
    state.update(change(0, 1), 0.0)
    with pytest.raises(ValueError, match=str(MAX_NAMES)):
        state.update(change(MAX_NAMES, 1), 0.0)


def test_a_router_may_send_a_limited_number_of_events() -> None:
    budget = EventBudget(0.0)
    for _ in range(int(MAX_EVENTS_S * BURST_S)):
        budget.spend(b": alive", num_pods=1, now_s=0.0)
    for now_s in range(1, 9):
        for _ in range(MAX_EVENTS_S):
            budget.spend(b": alive", num_pods=1, now_s=now_s)
        with pytest.raises(ValueError, match=f"more than {MAX_EVENTS_S} events a second"):
            copy(budget).spend(b": alive", num_pods=1, now_s=now_s)


@pytest.mark.parametrize("num_pods", [1, 1000])
@pytest.mark.parametrize("silence_s", [0.2, 60.0], ids=["steady", "after pauses of the operator"])
def test_a_busy_router_stays_below_the_limits(silence_s: float, num_pods: int) -> None:
    """It sends five events a second, each about all of its replicas. While the operator does nothing, they wait."""
    load = ReplicaLoad(running=256, waiting=999, free_blocks=10**6, cached_blocks=10**6, total_blocks=10**7)
    model = ModelSize(max_model_len=10**6, weights_bytes=10**12, kv_bytes=10**12, kv_tokens=10**8)
    replica = ReplicaState(
        name="a-service-engine-5d8c7f9b6d-x7k2p",
        url="http://[2001:db8:85a3:1234:5678:8a2e:370:7334]:8000",
        state="exact",
        models=("meta-llama/Llama-3.3-70B-Instruct",),
        epoch="f" * 16,
        acknowledged_epoch="f" * 16,
        load=load,
        model=model,
        revision="f" * 40,
        startup_s={"import": 12.345678, "compile": 12.345678, "weights": 123.45678},
        adapters=tuple(f"{i:<20}" for i in range(16)),
        adapter_file=AdapterFile("f" * 16, {f"{i:<20}": "r" * 200 for i in range(2)}),
    )
    budget, event = EventBudget(0.0), msgspec.json.encode(Change(replicas=(replica,) * num_pods))
    for i in range(1, 4):
        for _ in range(round(5 * silence_s)):
            budget.spend(event, num_pods=num_pods, now_s=i * silence_s)


@pytest.mark.parametrize("event", [b"x" * (4 << 20), b'{"name":"a"},' * 20_000], ids=["long", "of many objects"])
def test_a_large_event_counts_as_several(event: bytes) -> None:
    budget = EventBudget(0.0)
    budget.spend(event, num_pods=1, now_s=0.0)
    budget.spend(event, num_pods=1000, now_s=0.0)
    budget.spend(event, num_pods=1, now_s=10.0)
    with pytest.raises(ValueError, match="events a second"):
        budget.spend(event * 3, num_pods=1, now_s=10.0)


async def test_a_router_that_sends_too_much_is_left_alone_for_growing_times(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    admitted = b'data: {"type": "change", "replicas": [{"name": "engine-0", "acknowledged_epoch": "e1"}]}\n\n'
    flood, is_over = admitted + b"\n\n" * int(MAX_EVENTS_S * BURST_S), asyncio.Event()
    answers = iter((flood, flood, flood, admitted))

    async def respond(request: web.Request) -> web.StreamResponse:
        response, answer = web.StreamResponse(), next(answers)
        await response.prepare(request)
        operator.clock.now_s += LAST_RETRY_S * (answer is admitted)
        await response.write(answer)
        await is_over.wait()
        return response

    async with _reading(operator, respond) as reports:
        assert [await operator.next_pause() for _ in range(3)] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
        assert [await operator.next_change() for _ in range(3)] == [POD] * 3  # admitted, closed, admitted again
        assert reports.for_pods("default", [POD[1]])[POD[1]].admitted == {"engine-0": "e1"}
        is_over.set()
    assert caplog.text.count("events a second") == 1
    assert caplog.records[0].levelname == "WARNING"


def test_events_are_split_at_blank_lines() -> None:
    pending, found = bytearray(), []
    for byte in b"data: 1\n\n: alive\n\n\ndata: 2":
        pending.append(byte)
        found += split_events(pending, 1)
    assert (found, bytes(pending)) == ([b"data: 1", b": alive"], b"\ndata: 2")
    pending[:] = b"data: 1\n\ndata: 2\n\n\n\ndata"
    assert ([*split_events(pending, len(pending))], bytes(pending)) == ([b"data: 1", b"data: 2", b""], b"data")


async def test_an_event_without_an_end_is_refused(
    router: Router, reports: RouterReports, operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        router.lines.put_nowait(b"data: " + b"x" * (1 << 20))
    assert await operator.next_pause() == RETRY_S
    router.lines.put_nowait(None)
    assert "4194304 bytes" in caplog.text
