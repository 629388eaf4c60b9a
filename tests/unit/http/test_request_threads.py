"""Large requests take turns by tenant, and a thread is free again only when its work has ended."""

import asyncio
import threading

import pytest
from octavo_server.http.request_threads import SMALL_BYTES, TENANT, RequestThreads

LARGE = SMALL_BYTES + 1


class Works:
    """Starts large calls that end when the test says so, and records the order in which they begin."""

    def __init__(self, num_threads):
        self.threads = RequestThreads(num_large=num_threads)
        self.begun = asyncio.Queue()
        self._ends = {}
        self._loop = asyncio.get_running_loop()

    def start(self, tenant, name):
        self._ends[name] = threading.Event()

        async def serve():
            TENANT.set(tenant)
            return await self.threads.run(lambda: self._work(name), num_bytes=LARGE)

        return asyncio.create_task(serve())

    def _work(self, name):
        self._loop.call_soon_threadsafe(self.begun.put_nowait, name)
        self._ends[name].wait(120)
        return name

    async def next_begun(self):
        return await asyncio.wait_for(self.begun.get(), 120)

    def end(self, name):
        self._ends[name].set()

    async def end_all(self, tasks):
        for name in self._ends:
            self.end(name)
        return await asyncio.gather(*tasks)


async def test_a_free_thread_goes_to_the_tenant_that_holds_the_fewest():
    works = Works(2)
    tasks = [works.start("mallory", f"m{i}") for i in range(4)]
    assert [await works.next_begun() for _ in range(2)] == ["m0", "m1"]
    tasks.append(works.start("alice", "a0"))
    await asyncio.sleep(0)
    works.end("m0")
    assert await works.next_begun() == "a0"
    works.end("m1")
    assert await works.next_begun() == "m2"
    assert await works.end_all(tasks) == ["m0", "m1", "m2", "m3", "a0"]


async def test_tenants_that_hold_the_same_number_take_turns():
    works = Works(1)
    tasks = [works.start(tenant, f"{tenant}{i}") for tenant in ("m", "a", "b") for i in range(2)]
    order = []
    for _ in tasks:
        order.append(await works.next_begun())
        works.end(order[-1])
    assert order == ["m0", "m1", "a0", "b0", "a1", "b1"]
    await works.end_all(tasks)


async def test_a_cancelled_request_keeps_its_thread_until_the_work_has_ended():
    works = Works(1)
    first, second, third = (works.start("t", name) for name in ("first", "second", "third"))
    assert await works.next_begun() == "first"
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert works.begun.empty(), "the first one's work still runs"
    works.end("first")
    assert await works.next_begun() == "third"
    await works.end_all([third])


async def test_a_request_that_is_cancelled_when_its_turn_comes_passes_the_turn_on():
    threads = RequestThreads(num_large=1)
    first, second, third = (asyncio.create_task(threads._wait_for_turn("t")) for _ in range(3))
    await first
    threads._end_turn("t")
    second.cancel()
    await asyncio.wait_for(third, 120)
    assert second.cancelled()


async def test_an_error_of_the_call_is_raised_and_frees_the_thread():
    threads = RequestThreads(num_large=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0, num_bytes=LARGE)
    assert await threads.run(lambda: "next", num_bytes=LARGE) == "next"
