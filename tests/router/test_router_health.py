"""Health checks: the effect of a late, failing or missing response of `/health` on requests."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_testing.fake_replica import FakeReplica, vllm_replica
from octavo_testing.fleets import QUICK, running_fleet, until
from octavo_testing.routing import routing

MODEL, TEXT = "llama", "/v1/completions"


class Health:
    """Makes the next `num_misses` health checks of a replica fail, with a 503 or without a response."""

    def __init__(self, fake, *, is_mute):
        self.num_misses = self.num_checks = 0
        self._is_mute = is_mute
        fake.answers["/health"] = self._answer

    async def _answer(self, _):
        self.num_checks += 1
        if not self.num_misses:
            return web.Response()
        self.num_misses -= 1
        if self._is_mute:
            await asyncio.Event().wait()
        return web.Response(status=503)


@pytest.mark.parametrize("is_mute", [False, True], ids=["503", "mute"])
async def test_misses_below_the_limit_stop_no_requests(is_mute):
    fake = vllm_replica(MODEL)
    health = Health(fake, is_mute=is_mute)
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable(MODEL))
        states = []
        fleet.on_change.append(lambda replica: states.append((replica.state, replica.is_silent)))
        health.num_misses = QUICK.max_misses - 1
        await until(lambda: len(states) >= 2)
        assert states == [("blind", True), ("blind", False)]


@pytest.mark.parametrize("is_mute", [False, True], ids=["503", "mute"])
async def test_a_replica_without_any_response_is_unresponsive(is_mute):
    fake = vllm_replica(MODEL)
    health = Health(fake, is_mute=is_mute)
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable(MODEL))
        (replica,) = fleet.replicas
        ends = []
        fleet.on_change.append(lambda r: ends.append(r.is_unresponsive) if r.state == "connecting" else None)
        health.num_misses = QUICK.max_misses
        await until(lambda: ends)
        assert ends == [is_mute]
        await until(lambda: fleet.routable(MODEL))
        assert not replica.is_unresponsive


async def test_a_replica_that_missed_a_check_is_the_last_choice():
    fake, other = vllm_replica(MODEL), vllm_replica(MODEL)
    health = Health(fake, is_mute=True)
    async with running_fleet(fake, other) as fleet:
        await until(lambda: len(fleet.routable(MODEL)) == 2)
        health.num_misses = 1
        await until(lambda: [replica.url for replica in fleet.routable(MODEL)] == [other.url])
        await until(lambda: len(fleet.routable(MODEL)) == 2)


async def test_a_late_model_list_counts_as_a_miss():
    """A busy API process doesn't answer for a while, and the list of its models may be due then."""
    fake = vllm_replica(MODEL)
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable(MODEL))
        states, asked = [], []
        fleet.on_change.append(lambda replica: states.append(replica.state))

        async def late(_):
            asked.append(1)
            await asyncio.Event().wait()

        fake.answers["/v1/models"] = late
        await until(lambda: len(asked) > 2)
        assert "connecting" not in states


async def test_a_resumed_stream_ends_the_health_check():
    fake = FakeReplica(heartbeat_s=0.05)
    settings = FollowSettings(answer_timeout_s=30)
    async with running_fleet(fake, settings=settings) as fleet:
        await until(lambda: fleet.routable("fake"))
        (replica,) = fleet.replicas
        health = Health(fake, is_mute=True)
        health.num_misses = 1
        fake.spoil = lambda _: ()
        await until(lambda: health.num_checks)
        assert (replica.state, replica.is_silent) == ("blind", True)
        fake.spoil = None
        await until(lambda: replica.is_exact and not replica.is_silent)
        assert fake.num_connections == 1


@asynccontextmanager
async def waiting_request():
    """A router over two replicas, with a request whose response one of them delays."""
    fakes, release, asked = (vllm_replica(MODEL), vllm_replica(MODEL)), asyncio.Event(), []

    def holding(fake):
        async def answer(_):
            asked.append(fake)
            if asked[0] is fake:
                await release.wait()
            return web.json_response({"from": fake.url})

        return answer

    for fake in fakes:
        fake.answers[TEXT] = holding(fake)
        await fake.start()
    async with routing(*(fake.url for fake in fakes)) as routed:
        await routed.routable(MODEL, 2)
        request = asyncio.create_task(routed.http.post(TEXT, json={"model": MODEL, "prompt": "hi"}))
        await until(lambda: asked)
        replica = next(r for r in routed.router.fleet.replicas if r.url == asked[0].url)
        yield routed.router.fleet, replica, request, release, asked
        release.set()
    for fake in fakes:
        await fake.stop()


async def test_a_failed_health_check_does_not_move_a_waiting_request():
    async with waiting_request() as (fleet, replica, request, release, asked):
        replica.state = "connecting"
        fleet.notify_change(replica)
        release.set()
        answer = await request
        assert (answer.status_code, answer.json()["from"], len(asked)) == (200, replica.url, 1)


async def test_a_request_whose_replica_fell_silent_is_not_sent_to_another():
    """It may be the cause, and would then take replica after replica."""
    async with waiting_request() as (fleet, replica, request, _, asked):
        replica.state, replica.is_unresponsive = "connecting", True
        fleet.notify_change(replica)
        answer = await request
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "GatewayTimeoutError")
        assert len(asked) == 1


async def test_a_breaker_is_reset_only_when_its_replica_becomes_exact():
    fake = FakeReplica()
    await fake.start()
    async with routing(fake.url) as routed:
        await routed.routable("fake", 1)
        (replica,) = routed.router.fleet.replicas
        breakers = routed.router.balancer.breakers
        for _ in range(routed.router.settings.forward.breaker_failures):
            breakers.record_failure(replica.name)
        routed.router.fleet.notify_change(replica)
        assert breakers.state(replica.name) == "open"
        replica.state = "blind"
        routed.router.fleet.notify_change(replica)
        replica.state = "exact"
        routed.router.fleet.notify_change(replica)
        assert breakers.state(replica.name) == "closed"
    await fake.stop()
