"""The work queue: one worker per key, no lost keys, and growing delays for failed keys."""

import asyncio

from octavo_operator.cluster.queue import FIRST_RETRY_S, LAST_RETRY_S, WorkQueue


async def _next_key(queue: WorkQueue[str]) -> str:
    async with asyncio.timeout(120):
        return await queue.get()


async def test_a_key_added_twice_is_returned_once() -> None:
    queue = WorkQueue[str]()
    for key in ("a", "b", "a"):
        queue.add(key)
    assert [await _next_key(queue), await _next_key(queue)] == ["a", "b"]
    assert len(queue) == 0


async def test_a_key_added_during_its_work_is_returned_again() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    await _next_key(queue)
    queue.add("a")
    waiting = asyncio.create_task(_next_key(queue))
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.done("a")
    assert await waiting == "a"


async def test_the_delay_of_a_key_grows_until_it_succeeds() -> None:
    queue = WorkQueue[str]()
    delays = []
    for _ in range(12):
        queue.add("a")
        await _next_key(queue)
        delays.append(queue.failed("a"))
    assert delays[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert max(delays) == LAST_RETRY_S
    queue.add("a")
    await _next_key(queue)
    queue.done("a")
    queue.add("a")
    await _next_key(queue)
    assert queue.failed("a") == FIRST_RETRY_S


async def test_adding_a_failed_key_skips_its_delay() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    await _next_key(queue)
    queue.failed("a")
    queue.add("a")
    assert await _next_key(queue) == "a"


async def test_the_shortest_delay_of_a_key_counts() -> None:
    queue = WorkQueue[str]()
    for delay_s in (1000.0, 0.0, 1000.0):
        queue.add_later("a", delay_s)
    assert await _next_key(queue) == "a"


async def test_a_paused_queue_returns_failed_keys_at_once_on_resume() -> None:
    queue = WorkQueue[str]()
    queue.add("failing")
    await _next_key(queue)
    queue.failed("failing")
    queue.pause()
    queue.add("a")
    waiting = asyncio.create_task(_next_key(queue))
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.resume()
    assert {await waiting, await _next_key(queue)} == {"a", "failing"}


async def test_the_queue_is_idle_when_no_worker_has_a_key() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    queue.add("b")
    await _next_key(queue)
    idle = asyncio.create_task(queue.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    queue.done("a")
    async with asyncio.timeout(120):
        await idle
    assert len(queue) == 1
