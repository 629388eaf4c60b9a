"""The queue: the order of requests, and the errors of refused and expired ones."""

import asyncio

import pytest
from octavo_engine.wire.errors import Overloaded, Unavailable
from octavo_server.router.balance.queue import RequestQueue


class Places:
    def __init__(self, max_waiting=10):
        self.free = {"m": 0, "n": 0}
        self.gone_on = []
        self.outcomes = []
        self.queue = RequestQueue(max_waiting=max_waiting, observe=lambda outcome, _: self.outcomes.append(outcome))

    async def ask(self, name, model="m", hold_s=1e9, tenant=""):
        has_room = lambda: self.free[model] > 0  # noqa: E731
        await self.queue.wait(model, has_room, tenant=tenant, hold_s=hold_s, why="it is full")
        self.free[model] -= 1
        self.gone_on.append(name)
        self.queue.wake()


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_proceed_in_order_of_arrival():
    places = Places()
    tasks = [asyncio.create_task(places.ask(i)) for i in range(5)]
    await turns()
    places.free["m"] = 3
    places.queue.wake()
    await turns()
    assert (places.gone_on, len(places.queue), dict(places.queue.num_by_model())) == ([0, 1, 2], 2, {"m": 2})
    places.free["m"] = 2
    places.queue.wake()
    await asyncio.gather(*tasks)
    assert places.gone_on == [0, 1, 2, 3, 4]
    assert not places.queue.has_waiting("m")
    assert places.outcomes == ["sent"] * 5


async def test_one_model_does_not_wait_for_another():
    places = Places()
    tasks = [asyncio.create_task(places.ask(name, model)) for name, model in (("a", "m"), ("b", "n"))]
    await turns()
    places.free["n"] = 1
    places.queue.wake()
    await turns()
    assert places.gone_on == ["b"]
    assert (places.queue.has_waiting("m"), places.queue.has_waiting("n")) == (True, False)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(places.queue) == 0


async def test_a_full_queue_refuses_at_once():
    places = Places(max_waiting=1)
    task = asyncio.create_task(places.ask("a"))
    await turns()
    with pytest.raises(Overloaded, match=r"it is full; waiting requests: 1, limit: 1 \(--max-queued-reqs\)") as refused:
        await places.ask("b")
    assert refused.value.retry_after_s >= 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert places.outcomes == ["refused", "left"]


async def test_a_wait_expires():
    places = Places()
    with pytest.raises(Unavailable, match="it is full"):
        await places.ask("a", hold_s=0.0)
    assert (len(places.queue), places.outcomes) == (0, ["expired"])


async def test_a_tenant_keeps_to_half_of_the_queue_while_another_waits():
    places = Places(max_waiting=4)
    tasks = [asyncio.create_task(places.ask(i, tenant=tenant)) for i, tenant in enumerate(("bob", "alice", "alice"))]
    await turns()
    with pytest.raises(Overloaded, match=r"of this API key: 2, limit while others wait: 2 \(--max-queued-reqs / 2\)"):
        await places.ask(3, tenant="alice")
    tasks.append(asyncio.create_task(places.ask(4, tenant="bob")))
    await turns()
    assert (len(places.queue), places.outcomes) == (4, ["refused"])
    places.free["m"] = 4
    places.queue.wake()
    await asyncio.gather(*tasks)
