import asyncio
import json

import pytest
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.observe.state import merged, replica_state, router_state
from octavo_server.router.observe.state_stream import LEAST_DISTANCE_S, StateFeed
from octavo_testing.router_parts import exact_replica
from octavo_testing.server import events

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Router:
    def __init__(self):
        self.index = PrefixIndex(max_entries=100)
        self.replicas = [exact_replica("a", self.index), exact_replica("b", self.index)]
        self.queue: dict[str, int] = {}

    def state(self):
        return router_state([replica_state(r, 0.0) for r in self.replicas], queue=self.queue)

    async def source(self):
        return self.state()


def parsed(frame):
    (event,) = events(frame.decode())
    return json.loads(event)


async def test_the_whole_state_precedes_the_changes():
    router = Router()
    feed = StateFeed(router.source, period_s=0.001, heartbeat_s=60)
    frames = feed.frames()
    first = parsed(await anext(frames))
    assert (first["type"], first["version"], first["router"]) == ("state", 1, feed.router)
    assert [(r["name"], r["admitted"], r["acknowledged_epoch"]) for r in first["state"]["replicas"]] == [
        ("a", True, "0000000000000001"),
        ("b", True, "0000000000000001"),
    ]
    router.replicas[0].local_load.num_in_flight, router.queue = 3, {"m": 5}
    change = parsed(await anext(frames))
    assert change.keys() == {"type", "replicas", "queue"}
    assert [(r["name"], r["in_flight"]) for r in change["replicas"]] == [("a", 3)]
    del router.replicas[1]
    assert parsed(await anext(frames)) == {"type": "change", "gone": ["b"]}
    await frames.aclose()
    assert feed.num_readers == 0


async def test_a_slow_reader_gets_merged_changes():
    router = Router()
    frames = StateFeed(router.source, period_s=0.001).frames()
    await anext(frames)
    for number in range(1000):
        router.queue = {"m": number}
    assert parsed(await anext(frames)) == {"type": "change", "queue": {"m": 999}}
    await frames.aclose()


async def test_notify_sends_at_once_and_silence_has_a_heartbeat():
    router = Router()
    feed = StateFeed(router.source, period_s=60, heartbeat_s=0)
    frames = feed.frames()
    await anext(frames)
    router.queue = {"m": 1}
    feed.notify()
    assert parsed(await anext(frames)) == {"type": "change", "queue": {"m": 1}}
    feed.notify()
    assert parsed(await anext(frames)) == {"type": "heartbeat"}
    await frames.aclose()


async def test_urgent_changes_have_a_least_distance():
    """Clients can cause urgent changes, and the operator disconnects a router that sends too many."""
    router, pauses, is_over = Router(), [], asyncio.Event()

    async def pause(delay_s):
        pauses.append(delay_s)
        await is_over.wait()

    feed = StateFeed(router.source, period_s=60, pause=pause)
    frames = feed.frames()
    await anext(frames)
    router.queue = {"m": 1}
    feed.notify()
    assert parsed(await anext(frames))["queue"] == {"m": 1}
    waiting = asyncio.ensure_future(anext(frames))
    for number in (2, 3):
        router.queue = {"m": number}
        feed.notify()
        await asyncio.sleep(0)
    assert (pauses, waiting.done()) == ([LEAST_DISTANCE_S], False)
    is_over.set()
    assert parsed(await waiting)["queue"] == {"m": 3}
    await frames.aclose()


async def test_the_last_change_is_sent_before_the_end():
    router = Router()

    async def pause(_):
        router.queue = {"m": 2}
        feed.close("the router is shutting down")

    feed = StateFeed(router.source, period_s=60, pause=pause)
    frames = feed.frames()
    await anext(frames)
    router.queue = {"m": 1}
    feed.notify()
    assert parsed(await anext(frames))["queue"] == {"m": 1}
    change, end = [parsed(frame) async for frame in frames]
    assert (change["queue"], end["type"]) == ({"m": 2}, "bye")


async def test_a_closed_feed_sends_its_reason():
    feed = StateFeed(Router().source, period_s=60)
    frames = feed.frames()
    await anext(frames)
    ending = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    feed.close("the router is shutting down")
    assert parsed(await ending) == {"type": "bye", "reason": "the router is shutting down"}
    assert [frame async for frame in frames] == []


async def test_a_replica_is_admitted_when_every_worker_may_send_to_it():
    one, other = Router(), Router()
    one.replicas[0].local_load.num_in_flight = other.replicas[0].local_load.num_in_flight = 2
    other.replicas[1].state, other.replicas[1].admitted_epoch = "loading", None
    a, b = merged([one.state(), other.state()]).replicas
    assert (a.admitted, a.withdrawn, a.acknowledged_epoch, a.in_flight) == (True, False, "0000000000000001", 4)
    assert (b.admitted, b.withdrawn, b.acknowledged_epoch, b.state) == (False, False, None, "loading")
    other.replicas = [exact_replica("b", other.index)]
    assert [(r.name, r.admitted) for r in merged([one.state(), other.state()]).replicas] == [("a", False), ("b", True)]


async def test_waiting_requests_of_all_workers_add_up():
    states = [
        router_state((), queue={"m": 2}, held={"m": 1}, requests={"m": 4}),
        router_state((), queue={"m": 3}, held={"m": 2, "n": 1}, requests={"m": 5, "n": 1}),
    ]
    together = merged(states)
    assert (together.queue, together.held, together.requests) == ({"m": 5}, {"m": 3, "n": 1}, {"m": 9, "n": 1})
    assert together.workers == 2


@pytest.mark.parametrize("accepts", [(True, True), (True, False), (False, False)])
async def test_a_router_accepts_requests_when_every_worker_does(accepts):
    assert merged([router_state((), accepts=one) for one in accepts]).accepts is all(accepts)
