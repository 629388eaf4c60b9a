"""The work queue: each key to one worker at a time, none forgotten, a failing one later each time."""

import asyncio

from octavo_operator.cluster.queue import FIRST_RETRY_S, LAST_RETRY_S, WorkQueue


async def _taken(queue: WorkQueue[str]) -> str:
    async with asyncio.timeout(5):
        return await queue.get()


async def test_a_key_added_twice_is_given_out_once() -> None:
    queue = WorkQueue[str]()
    for key in ("a", "b", "a"):
        queue.add(key)
    assert [await _taken(queue), await _taken(queue)] == ["a", "b"]
    assert len(queue) == 0


async def test_a_key_added_while_it_is_worked_on_comes_again_afterwards() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    await _taken(queue)
    queue.add("a")
    waiting = asyncio.create_task(_taken(queue))
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.done("a")
    assert await waiting == "a"


async def test_a_failing_key_waits_longer_each_time_and_no_longer_once_it_succeeds() -> None:
    queue = WorkQueue[str]()
    delays = []
    for _ in range(12):
        queue.add("a")
        await _taken(queue)
        delays.append(queue.failed("a"))
    assert delays[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert max(delays) == LAST_RETRY_S
    queue.add("a")
    await _taken(queue)
    queue.done("a")
    queue.add("a")
    await _taken(queue)
    assert queue.failed("a") == FIRST_RETRY_S


async def test_news_of_a_failing_key_does_not_wait() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    await _taken(queue)
    queue.failed("a")
    queue.add("a")
    assert await _taken(queue) == "a"


async def test_nothing_is_given_out_while_it_is_held_and_what_failed_comes_at_once_afterwards() -> None:
    queue = WorkQueue[str]()
    queue.add("failing")
    await _taken(queue)
    queue.failed("failing")
    queue.pause()
    queue.add("a")
    waiting = asyncio.create_task(_taken(queue))
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.resume()
    assert {await waiting, await _taken(queue)} == {"a", "failing"}


async def test_it_is_idle_once_nobody_works() -> None:
    queue = WorkQueue[str]()
    queue.add("a")
    queue.add("b")
    await _taken(queue)
    idle = asyncio.create_task(queue.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    queue.done("a")
    async with asyncio.timeout(5):
        await idle
    assert len(queue) == 1
