"""Faults that must stay with one replica: a poisoned request, answers that fail at once, a slow /health.

A real router process over fake replicas that live in the test's event loop.
"""

import asyncio
import re
from collections import Counter

import httpx
import pytest
from aiohttp import web
from octavo_testing.attack_targets import router_target
from octavo_testing.fleets import until
from octavo_testing.raw_http import RawConnection, ask, completion_body, request_bytes
from octavo_testing.recording_replica import RecordingReplica, answering, taking

pytestmark = pytest.mark.slow

POISON = "poison"
MOST_KILLED = 2
NUM_REQUESTS = 600
#: Ten to a replica that works; what a generation takes, beside which a failure costs nothing.
CONCURRENCY, SERVICE_S = 150, 1.0
SLOW_HEALTH_S = 3.0
LIMIT_S = 90.0


class MortalReplica(RecordingReplica):
    """Resets all connections, as a dying process does, when it reads the poison."""

    def __init__(self, dead):
        super().__init__(self._die_of_poison)
        self._dead = dead

    async def _die_of_poison(self, seen):
        if POISON in seen.prompt:
            self._dead.append(self.port)
            self._dying = asyncio.create_task(self.kill())
            await asyncio.Event().wait()  # the connection is being reset
        await asyncio.sleep(0.01)


async def ask_many(port, prompts, *, concurrency=CONCURRENCY):
    """Send many requests and count the statuses."""
    source, statuses = iter(prompts), Counter()

    async def ask_on():
        for prompt in source:
            statuses[(await ask(port, prompt)).status] += 1

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    return statuses


async def test_a_poisoned_request_kills_at_most_two_replicas(tmp_path):
    dead = []
    replicas = [MortalReplica(dead) for _ in range(6)]
    async with router_target(tmp_path, replicas) as router:
        while min(len(replica.seen) for replica in replicas) < 3:  # so that the router keeps connections to each
            await ask_many(router.port, [f"warm {i}" for i in range(48)], concurrency=48)
        async with await RawConnection.open(router.port) as connection:
            await connection.send(request_bytes(completion_body(POISON)))
            answering_it = asyncio.create_task(connection.read_answers(1, timeout_s=LIMIT_S))
            await until(lambda: answering_it.done() or len(dead) > MOST_KILLED, limit_s=LIMIT_S)
            assert len(dead) <= MOST_KILLED
            (answer,) = await answering_it
        assert answer.status >= 500
        assert await ask_many(router.port, [f"after {i}" for i in range(20)], concurrency=4) == {200: 20}


@pytest.mark.parametrize(
    ("status", "most"),
    [
        pytest.param(500, NUM_REQUESTS // 8, id="500"),
        # These may be the request's own fault, until another replica has answered one of the requests.
        pytest.param(401, CONCURRENCY, id="401"),
        pytest.param(404, CONCURRENCY, id="404"),
    ],
)
async def test_a_replica_that_fails_at_once_gets_few_requests(tmp_path, status, most):
    failing = RecordingReplica(answering(status))
    replicas = [failing, *(RecordingReplica(taking(SERVICE_S)) for _ in range(15))]
    async with router_target(tmp_path, replicas) as router:
        await ask_many(router.port, [f"{i:06d} is the number of this request" for i in range(NUM_REQUESTS)])
        assert len(failing.seen) <= most


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_errors_of_clients_eject_no_replica(tmp_path, status):
    refuse = answering(status)

    async def behave(seen):
        return await (refuse if seen.prompt.startswith("bad") else taking(0.01))(seen)

    replicas = [RecordingReplica(behave) for _ in range(4)]
    async with router_target(tmp_path, replicas) as router:
        assert await ask_many(router.port, [f"bad {i}" for i in range(100)], concurrency=16) == {status: 100}
        before = [len(replica.seen) for replica in replicas]
        assert await ask_many(router.port, [f"good {i}" for i in range(200)], concurrency=16) == {200: 200}
        later = [len(replica.seen) - count for replica, count in zip(replicas, before, strict=True)]
    assert min(later) >= 10


async def test_never_more_than_half_of_the_replicas_are_ejected(tmp_path):
    replicas = [RecordingReplica(answering(500)) for _ in range(3)] + [RecordingReplica(taking(0.02))]
    async with router_target(tmp_path, replicas) as router:
        await ask_many(router.port, [f"first {i}" for i in range(400)], concurrency=16)
        async with httpx.AsyncClient() as http:
            metrics = (await http.get(f"http://127.0.0.1:{router.port}/metrics")).text
    (num_ejected,) = re.findall(r"^octavo_router_endpoints_cut_off (\d+)", metrics, re.MULTILINE)
    assert 1 <= int(num_ejected) <= len(replicas) // 2
    assert max(replicas, key=lambda replica: len(replica.seen)) is replicas[-1]


class HeldReplica(RecordingReplica):
    """Answers completions once `released` is set. `/health` is slow for the one time after `slow_health` was called."""

    def __init__(self):
        super().__init__(self._hold)
        self.released = asyncio.Event()
        self.was_slow = asyncio.Event()
        self.num_heartbeats = 0
        self._is_slow = False
        self.answers["/health"] = self._health

    def slow_health(self):
        self._is_slow = True

    def fall_silent(self):
        """Stop the KV stream's heartbeats, so that the router requests /health."""
        self.spoil = lambda _: ()

    def speak(self):
        self.spoil = self._count

    def _count(self, frame):
        self.num_heartbeats += 1
        return (frame,)

    async def _hold(self, _):
        await self.released.wait()

    async def _health(self, _):
        is_slow, self._is_slow = self._is_slow, False
        try:
            await asyncio.sleep(SLOW_HEALTH_S if is_slow else 0)
        finally:
            if is_slow:
                self.was_slow.set()
        return web.Response()


async def pass_slow_health(replica, *, is_polled):
    """Return when one health check was slow and later ones succeeded for a while."""
    replica.slow_health()
    if is_polled:
        await until(replica.was_slow.is_set)
        num_healthy = replica.paths.count("/health")
        await until(lambda: replica.paths.count("/health") >= num_healthy + 2)
    else:
        replica.fall_silent()
        await until(replica.was_slow.is_set)
        replica.speak()
        await until(lambda: replica.num_heartbeats >= 3)


@pytest.mark.parametrize("is_polled", [True, False], ids=["polled", "kv-stream"])
async def test_one_slow_health_check_neither_fails_nor_moves_a_request(tmp_path, is_polled):
    replicas = [HeldReplica(), HeldReplica()]
    prompts = [f"held {i}" for i in range(8)]
    for replica in replicas:
        if is_polled:
            replica.serve_by_polling()
    async with router_target(tmp_path, replicas) as router:
        asking = [asyncio.create_task(ask(router.port, prompt, timeout_s=LIMIT_S)) for prompt in prompts]
        await until(lambda: len(router.prompts()) == len(prompts))
        assert all(replica.seen for replica in replicas)
        await pass_slow_health(replicas[0], is_polled=is_polled)
        for replica in replicas:
            replica.released.set()
        answers = await asyncio.gather(*asking)
    assert [answer.status for answer in answers] == [200] * len(prompts)
    assert Counter(router.prompts()) == Counter(prompts)
