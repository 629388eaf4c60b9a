"""Replicas that die, hang, restart or drain behind a router, and the fate of their requests. Real processes.

The engines are scripted and step only as the test lets them, so every stream is in its middle when the fault occurs.
"""

import asyncio
import json
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from octavo_testing.fleets import until
from octavo_testing.route_command import octavo_route, served_replicas
from octavo_testing.server import events

pytestmark = pytest.mark.slow

NUM_STREAMS = 50
TEXT = "/v1/completions"


@dataclass
class Stream:
    replica: str = ""
    text: str = ""
    is_over: bool = False

    @property
    def events(self):
        return events(self.text)

    @property
    def finish_reason(self):
        return json.loads(self.events[-2])["choices"][0]["finish_reason"]


def body_of(number, **fields):
    return {"model": "tiny", "prompt": f"{number} is my number", "max_tokens": 40, "ignore_eos": True, **fields}


async def read(http, stream, body):
    async with http.stream("POST", TEXT, json={**body, "stream": True}) as answer:
        stream.replica = answer.headers["x-octavo-replica"]
        async for part in answer.aiter_text():
            stream.text += part
    stream.is_over = True


@dataclass
class LoadedRouter:
    """50 begun streams on three replicas."""

    http: httpx.AsyncClient
    streams: list[Stream] = field(default_factory=list)
    tasks: list[asyncio.Task] = field(default_factory=list)

    async def begin(self, replicas):
        self.streams = [Stream() for _ in range(NUM_STREAMS)]
        self.tasks = [asyncio.create_task(read(self.http, s, body_of(i))) for i, s in enumerate(self.streams)]
        while not all(stream.text for stream in self.streams):
            for replica in replicas:
                replica.valve.allow_steps()
            await asyncio.sleep(0.02)
        assert not any(stream.is_over for stream in self.streams)
        assert {stream.replica for stream in self.streams} == {replica.name for replica in replicas}

    def on(self, replica):
        return [stream for stream in self.streams if stream.replica == replica.name]

    async def ask(self, number, **fields):
        return await self.http.post(TEXT, json=body_of(number, max_tokens=2, **fields))

    async def ask_later(self):
        """Return the answers to 30 new requests, after all streams have ended."""
        answers = await asyncio.gather(*(self.ask(f"later {i}") for i in range(30)))
        await asyncio.gather(*self.tasks)
        return answers


@asynccontextmanager
async def loaded_router(route, replicas):
    async with client(route) as http:
        loaded = LoadedRouter(http)
        await loaded.begin(replicas)
        yield loaded


def client(route):
    return httpx.AsyncClient(base_url=route.url, timeout=240, limits=httpx.Limits(max_connections=None))


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routed")
    with served_replicas(folder, 3, has_valves=True) as replicas:
        flags = [word for replica in replicas for word in ("--replica", replica.url)]
        with octavo_route(folder, *flags) as route:
            yield replicas, route


@pytest.fixture
def three_replicas(routed):
    """Three held replicas, and a router whose index is exact for all of them."""
    replicas, route = routed
    for replica in replicas:
        if not replica.is_running:
            replica.start()
        replica.valve.shut()
    route.wait_until_exact(3)
    yield routed
    for replica in replicas:
        replica.valve.open()


@pytest.mark.parametrize("what", ["replica", "core"])
def test_a_killed_replica_ends_only_its_own_streams(three_replicas, what):
    (killed, *others), route = three_replicas

    async def run():
        async with loaded_router(route, [killed, *others]) as loaded:
            killed.serving.core.kill() if what == "core" else killed.kill()
            racing = [asyncio.create_task(loaded.ask(f"racing {i}")) for i in range(20)]
            await until(lambda: all(stream.is_over for stream in loaded.on(killed)))
            await asyncio.to_thread(route.wait_until, lambda found: not found[killed.url]["admitted"])
            for replica in others:
                replica.valve.open()
            later = await loaded.ask_later()
            return loaded, await asyncio.gather(*racing), later

    loaded, racing, later = asyncio.run(run())
    for stream in loaded.streams:
        assert stream.events[-1] == "[DONE]"
        if stream.replica == killed.name:
            assert json.loads(stream.events[-2])["error"]["code"] in (502, 503)
        else:
            assert stream.finish_reason == "length"
    assert [answer.status_code for answer in (*racing, *later)] == [200] * 50
    assert killed.name not in {answer.headers["x-octavo-replica"] for answer in (*racing, *later)}


def test_a_restarted_replica_gets_requests_once_its_new_cache_is_known(three_replicas):
    (restarted, *others), route = three_replicas
    for replica in (restarted, *others):
        replica.valve.open()
    before = route.replicas()[restarted.url]["acknowledged_epoch"]
    restarted.kill()
    route.wait_until(lambda found: not found[restarted.url]["admitted"])
    restarted.start()
    route.wait_until_exact(3)
    found = route.replicas()[restarted.url]
    assert found["acknowledged_epoch"] == found["epoch"] != before

    async def run():
        async with client(route) as http:
            return await asyncio.gather(*(LoadedRouter(http).ask(i) for i in range(30)))

    answers = asyncio.run(run())
    assert {answer.status_code for answer in answers} == {200}
    assert restarted.name in {answer.headers["x-octavo-replica"] for answer in answers}


def test_a_hung_replica_gets_no_requests_and_its_streams_end(three_replicas):
    (hung, *others), route = three_replicas

    async def run():
        async with loaded_router(route, [hung, *others]) as loaded:
            hung.signal(signal.SIGSTOP)
            try:
                racing = [asyncio.create_task(loaded.ask(f"racing {i}")) for i in range(20)]
                for replica in others:
                    replica.valve.open()
                await asyncio.to_thread(route.wait_until, lambda found: not found[hung.url]["admitted"])
                later = await loaded.ask_later()
                return loaded, await asyncio.gather(*racing), later
            finally:
                hung.signal(signal.SIGCONT)

    loaded, racing, later = asyncio.run(run())
    for stream in loaded.streams:
        assert stream.events[-1] == "[DONE]"
        assert ("error" in json.loads(stream.events[-2])) == (stream.replica == hung.name)
    assert {answer.status_code for answer in racing} <= {200, 504}  # 504: the hung replica has received the request
    assert [answer.status_code for answer in later] == [200] * 30
    assert hung.name not in {answer.headers["x-octavo-replica"] for answer in later}
    hung.valve.open()
    route.wait_until_exact(3)


def test_a_replica_that_drains_costs_no_request(three_replicas):
    (leaving, *others), route = three_replicas

    async def run():
        async with loaded_router(route, [leaving, *others]) as loaded:
            leaving.signal(signal.SIGTERM)
            await asyncio.to_thread(route.wait_until, lambda found: not found[leaving.url]["admitted"])
            for replica in (leaving, *others):
                replica.valve.open()
            return loaded, await loaded.ask_later()

    loaded, later = asyncio.run(run())
    assert leaving.serving.exit_code() == 0
    assert {stream.finish_reason for stream in loaded.streams} == {"length"}
    assert {answer.status_code for answer in later} == {200}
    assert leaving.name not in {answer.headers["x-octavo-replica"] for answer in later}


def test_a_client_disconnect_frees_the_replica(three_replicas):
    replicas, route = three_replicas

    async def run():
        async with client(route) as http:
            tasks = [asyncio.create_task(read(http, Stream(), body_of(i))) for i in range(6)]
            tasks += [asyncio.create_task(http.post(TEXT, json=body_of(i + 100))) for i in range(6)]
            async with httpx.AsyncClient(timeout=240) as direct:

                async def loads():
                    answers = [await direct.get(f"{replica.url}/load") for replica in replicas]
                    return sum(answer.json()["server_load"] for answer in answers)

                while await loads() < 12:
                    await asyncio.sleep(0.01)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                while await loads():
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    metrics = httpx.get(f"{route.url}/metrics").text
    assert 'octavo_router_requests_total{model="tiny",code="499"' in metrics
    assert "octavo_router_inflight 0" in metrics
