"""`GET /state/events` of a real router, as operator and autoscaler read it."""

import asyncio
import json
import socket
from contextlib import aclosing

import httpx
import pytest
from aiohttp import web
from octavo_operator.cluster.reports import RouterReports, router_session
from octavo_server.router.observe.state import ReplicaState, RouterState
from octavo_server.router.observe.workers import WorkerGroup
from octavo_testing.fake_replica import MODEL, FakeReplica, lie
from octavo_testing.fleets import until
from octavo_testing.routing import routing
from octavo_testing.server import parse_metrics

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Listener:
    """Keeps the state as a client of the stream does."""

    def __init__(self, url):
        self._url = url
        self.replicas = {}
        self.rest = {}
        self.types = []

    async def run(self):
        async with (
            httpx.AsyncClient(timeout=240) as http,
            http.stream("GET", f"{self._url}/state/events") as answer,
            aclosing(answer.aiter_lines()) as lines,
        ):
            async for line in lines:
                if line:
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event):
        self.types.append(event.pop("type"))
        event = event.get("state", event)
        self.replicas |= {replica["name"]: replica for replica in event.pop("replicas", ())}
        for name in event.pop("gone", ()):
            del self.replicas[name]
        self.rest |= event


async def test_held_requests_and_the_first_admission_are_reported():
    async def fine(_):
        return web.json_response({})

    replica = FakeReplica()
    replica.answers[CHAT] = fine
    await replica.start()
    await replica.kill()
    held = socket.socket()  # keeps servers of other tests from the port; connections are refused
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", replica.port))
    async with routing(replica.url) as routed:
        listener = Listener(routed.url)
        listening = asyncio.create_task(listener.run())
        asking = asyncio.create_task(routed.http.post(CHAT, json=BODY))
        await until(lambda: listener.rest.get("held") == {MODEL: 1})
        (seen,) = listener.replicas.values()
        assert (seen["admitted"], seen["withdrawn"], seen["acknowledged_epoch"]) == (False, True, None)
        metrics = parse_metrics((await routed.http.get("/metrics")).text)
        assert metrics['octavo_router_held_requests{model=""}'] == 1, "a name that no replica has is no label"

        held.close()
        await replica.start()
        assert (await asking).status_code == 200
        await until(lambda: listener.rest["held"] == {} and listener.rest["models"] == [MODEL])
        await until(lambda: listener.rest["requests"] == {MODEL: 1})
        assert (await routed.http.post(CHAT, json=BODY | {"model": "unknown"})).status_code == 404
        await routed.http.post(CHAT, json=BODY)
        await until(lambda: listener.rest["requests"] == {MODEL: 2})
        (seen,) = listener.replicas.values()
        assert seen["admitted"]
        assert seen["acknowledged_epoch"] == seen["epoch"]
        assert seen["revision"] == "scripted-commit"

        replica.publisher.set_accepts(False)
        await until(lambda: next(iter(listener.replicas.values()))["withdrawn"])
        routed.server.should_exit = True
        await listening
        assert listener.types[-1] == "bye"
    await replica.stop()


async def test_the_operator_reads_the_state():
    replica, changes = FakeReplica(), asyncio.Queue()
    await replica.start()
    async with routing(replica.url) as routed, router_session() as session:
        fleet = routed.router.fleet
        reports = RouterReports(
            session, changes.put_nowait, engines_of=lambda _: {known.name for known in fleet.replicas}
        )
        reports.subscribe(("default", "router-0"), ("127.0.0.1", int(routed.url.rpartition(":")[2])))
        admitted = {}
        while not admitted:
            async with asyncio.timeout(10):
                await changes.get()
            report = reports.for_pods("default", ["router-0"])["router-0"]
            admitted = report.admitted
        (name,) = admitted
        assert report.start == routed.router.feed.router
        assert report.revisions == {name: "scripted-commit"}
        assert report.startups[name].keys() == {"import", "compile", "weights"}
        assert report.loads[name].num_blocks > 0
        await reports.aclose()
    await replica.stop()


@pytest.mark.parametrize("admin_secrets", [("of-the-operator",), ()], ids=["this version", "an older version"])
async def test_the_operator_opens_a_router_that_its_replicas_can_not_open(admin_secrets):
    """A router of an older version knows only the secret that it shares with replicas."""
    settings = {"router_secret": ("shared",), "admin_secret": admin_secrets, "admin_port": 0}
    async with routing(**settings) as routed, router_session() as session:
        url, changed = f"http://127.0.0.1:{routed.router.settings.admin_port}", asyncio.Event()
        for path, method in (("/state/events", "HEAD"), ("/drain", "GET"), ("/debug/index", "GET")):
            answer = await routed.http.request(method, f"{url}{path}", headers={"x-octavo-secret": "shared"})
            assert (answer.status_code == 401) is bool(admin_secrets), path
        reports = RouterReports(session, lambda _: changed.set(), engines_of=lambda _: frozenset())
        address = ("127.0.0.1", routed.router.settings.admin_port)
        reports.subscribe(("default", "router-0"), address, ("of-the-operator", "shared"))
        async with asyncio.timeout(10):
            await changed.wait()
        assert reports.for_pods("default", ["router-0"])["router-0"].start == routed.router.feed.router
        await reports.aclose()


class LieOnce:
    def __init__(self):
        self.is_over = False

    def __call__(self, frame):
        if self.is_over or not frame.stored:
            return (frame,)
        self.is_over = True
        return lie(frame)


async def test_a_drain_its_end_and_the_stop_are_reported():
    async with routing() as routed:
        listener = Listener(routed.url)
        listening = asyncio.create_task(listener.run())
        await until(lambda: listener.rest.get("accepts") is True)
        await routed.http.post("/drain")
        await until(lambda: listener.rest["accepts"] is False)
        await routed.http.delete("/drain")
        await until(lambda: listener.rest["accepts"] is True)
        async with asyncio.timeout(120):
            routed.server.stop()
            await listening
        assert (listener.rest["accepts"], listener.types[-1]) == (False, "bye")


async def test_a_stream_fault_is_counted_once_and_shown_until_the_resync():
    replica = FakeReplica()
    await replica.start()
    async with routing(replica.url) as routed:
        listener = Listener(routed.url)
        listening = asyncio.create_task(listener.run())
        await until(lambda: [r["state"] for r in listener.replicas.values()] == ["exact"])
        seen, replica.spoil = [], LieOnce()
        routed.router.fleet.on_change.append(lambda changed: seen.append(changed.state))
        replica.step(stored=[1, 2, 3])
        await until(lambda: [(r["state"], r["faults"]) for r in listener.replicas.values()] == [("exact", 1)])
        assert "blind" in seen
        found = parse_metrics((await routed.http.get("/metrics")).text)
        assert found["octavo_router_stream_faults_total"] == 1
        assert found["octavo_router_index_divergence_ratio"] == 0
        routed.server.should_exit = True
        await listening
    await replica.stop()


async def test_a_reader_that_stops_reading_is_disconnected():
    numbers = iter(range(10**9))

    async def large():
        replicas = (ReplicaState(name=f"{i}", url="u" * 1000, state="exact", blocks=next(numbers)) for i in range(500))
        return RouterState(replicas=tuple(replicas))

    async with routing(slow_client_timeout=0.3) as routed:
        feed = routed.router.feed
        feed._source, feed._period_s = large, 0.001
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", int(routed.url.rpartition(":")[2])))
            head = b"GET /state/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(sock, head)
            await until(lambda: feed.num_readers == 1)
            await until(lambda: feed.num_readers == 0)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_held_request_and_its_end_are_reported_at_once(num_workers, tmp_path):
    """Whichever worker of the router holds it."""
    groups = [WorkerGroup(tmp_path, number) for number in range(num_workers)] if num_workers > 1 else [None]
    async with routing(group=groups[0]) as listened, routing(group=groups[-1]) as routed:
        for worker in (listened, routed):
            worker.router.feed._period_s = 3600.0
        listener = Listener((listened if num_workers > 1 else routed).url)
        listening = asyncio.create_task(listener.run())
        await until(lambda: listener.rest.get("held") == {})
        asking = asyncio.create_task(routed.http.post(CHAT, json=BODY))
        await until(lambda: listener.rest["held"] == {MODEL: 1})
        asking.cancel()
        await until(lambda: listener.rest["held"] == {})
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
