"""The fleet follows the replicas that discovery adds and removes."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.fleet import DEPARTED_S, FEW_S, Fleet
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.model_names import MAX_AWAY_S, Known, Pending, Unknown
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_testing.clock import Clock
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import until


class ListedEndpoints:
    """A discovery whose endpoints the test sets."""

    def __init__(self):
        self._reported = asyncio.Queue()

    def report(self, *endpoints):
        self._reported.put_nowait(frozenset(endpoints))

    async def watch(self):
        while True:
            yield await self._reported.get()


@asynccontextmanager
async def fleet_of(*names, clock=time.monotonic):
    """Fake replicas by name, each with three blocks of its own; discovery lists none of them yet."""
    fakes = {name: FakeReplica(heartbeat_s=0.05) for name in names}
    for number, fake in enumerate(fakes.values()):
        fake.step(stored=[10 * number + k for k in (1, 2, 3)])
        await fake.start()
    discovery = ListedEndpoints()
    fleet = Fleet(FollowSettings(least_wait_s=0.01), discovery, PrefixIndex(max_entries=1000), clock)
    await fleet.start()
    try:
        yield fakes, discovery, fleet
    finally:
        await fleet.stop()
        for fake in fakes.values():
            await fake.stop()


@pytest.fixture
def clock():
    return Clock()


def at(fake, name, is_ready=None):
    return Endpoint(fake.url, name, is_ready)


def names(replicas):
    return sorted(replica.name for replica in replicas)


async def test_replicas_that_leave_discovery_leave_no_entries():
    async with fleet_of("a", "b") as (fakes, discovery, fleet):
        discovery.report(at(fakes["a"], "a"), at(fakes["b"], "b"))
        await until(lambda: names(fleet.routable(MODEL)) == ["a", "b"])
        (gone,) = [replica for replica in fleet.replicas if replica.name == "b"]
        discovery.report(at(fakes["a"], "a"))
        await until(lambda: gone.state == "gone" and len(fleet.index) == 3)
        assert names(fleet.replicas) == names(fleet.routable(MODEL)) == ["a"]
        await until(lambda: fakes["b"].publisher.num_listeners == 0)
        discovery.report()
        await until(lambda: not fleet.replicas)
        assert fleet.models() == []


async def test_an_unready_pod_is_followed_but_gets_no_requests():
    async with fleet_of("a") as (fakes, discovery, fleet):
        discovery.report(at(fakes["a"], "a", is_ready=False))
        await until(lambda: fleet.replicas and fleet.replicas[0].is_exact)
        (replica,) = fleet.replicas
        assert fleet.routable(MODEL) == []
        discovery.report(at(fakes["a"], "a", is_ready=True))
        await until(lambda: fleet.routable(MODEL) == [replica])
        discovery.report(at(fakes["a"], "a", is_ready=False))
        await until(lambda: fleet.routable(MODEL) == [])
        assert fakes["a"].num_connections == 1


async def test_readiness_does_not_wait_for_unready_pods():
    async with fleet_of("a") as (fakes, discovery, fleet):
        assert "discovery" in fleet.unready_reason
        discovery.report(at(fakes["a"], "a", is_ready=False))
        await until(lambda: fleet.unready_reason is None)
        assert fleet.routable(MODEL) == []
        discovery.report(at(fakes["a"], "a", is_ready=False), Endpoint("http://127.0.0.1:9", "b", is_ready=True))
        await until(lambda: fleet.unready_reason == "none of 1 replicas accepts requests")
        discovery.report(at(fakes["a"], "a", is_ready=True))
        await until(lambda: fleet.unready_reason is None and fleet.routable(MODEL))


async def test_a_pod_with_a_new_address_is_another_replica():
    async with fleet_of("a", "b") as (fakes, discovery, fleet):
        discovery.report(at(fakes["a"], "pod-0"))
        await until(lambda: fleet.routable(MODEL))
        (before,) = fleet.replicas
        discovery.report(at(fakes["b"], "pod-0"))
        await until(lambda: before.state == "gone" and fleet.routable(MODEL))
        assert [replica.url for replica in fleet.replicas] == [fakes["b"].url]


@pytest.mark.parametrize("rounds", [20])
async def test_released_slots_are_reused(rounds):
    async with fleet_of("a") as (fakes, discovery, fleet):
        slots = set()
        for _ in range(rounds):
            discovery.report(at(fakes["a"], "a"))
            await until(lambda: fleet.routable(MODEL))
            slots.add(fleet.replicas[0].blocks.slot)
            discovery.report()
            await until(lambda: not fleet.replicas and not len(fleet.index))
        assert len(slots) <= 4


async def test_replicas_are_grouped_by_model():
    async with fleet_of("a", "b") as (fakes, discovery, fleet):
        fakes["b"].models = ("other", MODEL)
        fakes["b"].begin()
        discovery.report(at(fakes["a"], "a"), at(fakes["b"], "b"))
        await until(lambda: names(fleet.routable(MODEL)) == ["a", "b"])
        assert names(fleet.routable("other")) == ["b"]
        assert fleet.routable("unknown") == []
        assert fleet.models() == [MODEL, "other"]


async def test_replicas_are_grouped_by_adapter():
    async with fleet_of("a", "b") as (fakes, discovery, fleet):
        fakes["a"].publisher.set_adapters({"x": "hash"})
        discovery.report(at(fakes["a"], "a"), at(fakes["b"], "b"))
        await until(lambda: names(fleet.routable(MODEL)) == ["a", "b"] and names(fleet.routable("x")) == ["a"])
        assert (fleet.models(), fleet.base_model("x"), fleet.base_model("y")) == ([MODEL, "x"], MODEL, "y")
        fakes["b"].publisher.set_adapters({"x": "hash", "y": "other"})
        await until(lambda: names(fleet.routable("x")) == ["a", "b"] and names(fleet.routable("y")) == ["b"])
        fakes["a"].publisher.set_adapters({})
        await until(lambda: names(fleet.routable("x")) == ["b"])
        assert isinstance(fleet.resolve(None), Known)
        assert fleet.resolve("z") == Unknown([MODEL, "x", "y"])


async def test_a_bug_in_discovery_is_logged_and_restarts_it(caplog):
    class Broken:
        num_starts = 0

        async def watch(self):
            self.num_starts += 1
            yield frozenset({Endpoint("http://127.0.0.1:9", f"start-{self.num_starts}")})
            raise ZeroDivisionError

    fleet = Fleet(FollowSettings(), Broken(), PrefixIndex(max_entries=1000))
    await fleet.start()
    await until(lambda: names(fleet.replicas) == ["start-2"])
    assert "the discovery of replicas failed" in caplog.text
    await fleet.stop()


async def test_a_bug_in_a_stream_client_is_logged_and_restarts_it(caplog):
    async with fleet_of("a") as (fakes, discovery, fleet):
        failures = [ZeroDivisionError("of a listener")]

        def fail_once(replica):
            if replica.is_exact and failures:
                raise failures.pop()

        states = []
        fleet.on_change += [lambda replica: states.append(replica.state), fail_once]
        discovery.report(at(fakes["a"], "a"))
        await until(lambda: fleet.routable(MODEL) and not failures and fakes["a"].num_connections == 2)
        assert "following replica a failed" in caplog.text
        assert "connecting" in states
        assert "gone" not in states


async def test_a_router_is_ready_when_most_replicas_accept_requests(clock):
    async with fleet_of("a", "b", clock=clock) as (fakes, discovery, fleet):
        dead = Endpoint("http://127.0.0.1:9", "dead")
        discovery.report(at(fakes["a"], "a"), dead)
        await until(lambda: fleet.routable(MODEL))
        assert fleet.unready_reason.startswith("1 of 2 replicas accept requests")
        discovery.report(at(fakes["a"], "a"), at(fakes["b"], "b"), dead)
        await until(lambda: len(fleet.routable(MODEL)) == 2)
        assert fleet.unready_reason is None


async def test_a_router_is_ready_two_seconds_after_its_first_replica(clock):
    async with fleet_of("a", clock=clock) as (fakes, discovery, fleet):
        discovery.report(at(fakes["a"], "a"), *(Endpoint("http://127.0.0.1:9", name) for name in "bc"))
        await until(lambda: fleet.routable(MODEL))
        assert fleet.unready_reason.startswith("1 of 3 replicas accept requests")
        clock.now_s += FEW_S
        assert fleet.unready_reason is None
        fakes["a"].publisher.set_accepts(False)
        await until(lambda: not fleet.routable(MODEL))
        assert fleet.unready_reason == "none of 3 replicas accepts requests"
        fakes["a"].publisher.set_accepts(True)
        await until(lambda: fleet.routable(MODEL))
        assert fleet.unready_reason is not None, "the 2 s start again when it accepts requests"


async def test_the_model_of_a_departed_replica_is_known_for_a_minute(clock):
    async with fleet_of("a", "b", clock=clock) as (fakes, discovery, fleet):
        discovery.report(at(fakes["a"], "a"))
        assert fleet.resolve(MODEL) == Pending()
        await until(lambda: fleet.resolve(MODEL) == Known(MODEL))
        discovery.report(Endpoint("http://127.0.0.1:9", "b"))
        await until(lambda: names(fleet.replicas) == ["b"])
        assert fleet.resolve(MODEL) == Known(MODEL)
        clock.now_s += DEPARTED_S
        assert fleet.resolve(MODEL) == Pending()


async def test_a_dead_replica_keeps_an_unknown_model_pending_for_seconds(clock):
    async with fleet_of("a", clock=clock) as (fakes, discovery, fleet):
        discovery.report(at(fakes["a"], "a"), Endpoint("http://127.0.0.1:9", "dead"))
        await until(lambda: fleet.routable(MODEL))
        pending = fleet.resolve("other")
        clock.now_s += MAX_AWAY_S
        assert pending == Pending(clock())
        assert fleet.resolve("other") == Unknown([MODEL])
