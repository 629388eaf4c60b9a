"""The queue: the order of requests, and the errors of refused and expired ones."""

import asyncio
from unittest.mock import Mock

import pytest
from octavo_engine.wire.errors import Overloaded, Unavailable
from octavo_server.router.balance.balancer import Balancer
from octavo_server.router.balance.queue import RequestQueue
from octavo_server.router.prompts.prompt import Prompt
from octavo_server.router.settings import ForwardLimits


class Places:
    def __init__(self, max_waiting=10):
        self.free = {"m": 0, "n": 0}
        self.gone_on = []
        self.outcomes = []
        self.queue = RequestQueue(max_waiting=max_waiting, observe=lambda outcome, _: self.outcomes.append(outcome))

    async def ask(self, name, model="m", hold_s=1e9, **options):
        has_room = lambda: self.free[model] > 0  # noqa: E731
        await self.queue.wait(model, has_room, hold_s=hold_s, why="it is full", **options)
        self.free[model] -= 1
        self.gone_on.append(name)
        self.queue.wake()

    async def admit(self, model="m"):
        """Free one place, and return the request that got it."""
        self.free[model] += 1
        self.queue.wake()
        await turns()
        return self.gone_on[-1]


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


async def test_the_cost_of_a_turn_counts_each_output():
    costs = []

    async def wait(*_, cost, **options):
        costs.append(cost)
        raise Unavailable("the queue is full", retry_after_s=1)

    queue, fleet = Mock(wait=wait), Mock(routable=lambda _: [], listed_service=lambda _: None)
    balancer = Balancer(fleet=fleet, picker=Mock(), pools=Mock(), queue=queue, limits=ForwardLimits())
    for prompt in (Prompt(10, 0, max_tokens=9), Prompt(10, 0, max_tokens=9, num_outputs=4), Prompt(10, 0)):
        with pytest.raises(Unavailable):
            async with balancer.acquire("m", prompt, weight=0.5, hold_s=1):
                raise AssertionError("no replica is free")
    assert costs == [2 * (10 + 2 * 9), 2 * (10 + 2 * 4 * 9), 2 * (10 + 2 * 128)]


async def ask_all(places, requests):
    """Queue requests, each a name of a tenant and its options, in this order; a request is named by its tenant."""
    tasks = [asyncio.create_task(places.ask(tenant, tenant=tenant, **options)) for tenant, options in requests]
    await turns()
    return tasks


async def test_a_key_waits_for_one_request_of_another_key_that_has_400_waiting():
    places = Places(max_waiting=1024)
    flood = await ask_all(places, [("mallory", {})] * 400)
    admitted = [await places.admit() for _ in range(10)]
    for _ in range(10):
        [task] = await ask_all(places, [("alice", {})])
        admitted += [await places.admit(), await places.admit()]
        assert task.done()
    assert set(admitted[:10]) == {"mallory"}
    places.free["m"] = 400
    places.queue.wake()
    await asyncio.gather(*flood)


async def test_a_thousand_keys_with_one_request_each_are_served_by_arrival():
    places = Places(max_waiting=1024)
    names = [f"key-{i}" for i in range(1000)]
    tasks = await ask_all(places, [(name, {"cost": 1 + i % 7}) for i, name in enumerate(names)])
    places.free["m"] = 1000
    places.queue.wake()
    await asyncio.gather(*tasks)
    assert places.gone_on == names


@pytest.mark.parametrize(
    ("costs", "parts"),
    [({"a": 1, "b": 1}, {"a": 20, "b": 20}), ({"a": 3, "b": 1}, {"a": 10, "b": 30}), ({"a": 0.25, "b": 1}, {"a": 32})],
    ids=["equal", "longer prompts", "a larger weight"],
)
async def test_tenants_get_equal_sums_of_costs(costs, parts):
    places = Places(max_waiting=1024)
    tasks = await ask_all(places, [(name, {"cost": cost}) for name, cost in costs.items() for _ in range(40)])
    admitted = [await places.admit() for _ in range(40)]
    assert {name: admitted.count(name) for name in parts} == pytest.approx(parts, abs=1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_that_leave_the_queue_cost_their_tenant_nothing():
    places = Places(max_waiting=1024)
    tasks = await ask_all(places, [("bob", {})] * 20 + [("alice", {})] * 20)
    for task in tasks[20:39]:
        task.cancel()
    await turns()
    admitted = [await places.admit() for _ in range(3)]
    assert "alice" in admitted
    [last] = await ask_all(places, [("alice", {})])
    assert "alice" in [await places.admit() for _ in range(3)]
    assert last.done()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tenant_that_was_away_has_saved_no_turns():
    places = Places(max_waiting=1024)
    tasks = await ask_all(places, [("bob", {})] * 100)
    for _ in range(50):
        await places.admit()
    tasks += await ask_all(places, [("alice", {})] * 40)
    admitted = [await places.admit() for _ in range(20)]
    assert admitted.count("alice") == pytest.approx(10, abs=1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_flood_for_one_model_delays_no_other_and_turns_are_forgotten_with_the_last_request():
    places = Places(max_waiting=1024)
    tasks = await ask_all(places, [("mallory", {})] * 100 + [("mallory", {"model": "n"}), ("alice", {"model": "n"})])
    assert [await places.admit("n"), await places.admit("n")] == ["mallory", "alice"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (len(places.queue), places.queue._turns, places.queue._latest_turn) == (0, {}, {})
