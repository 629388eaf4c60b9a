"""Threads in which requests are parsed, rendered and tokenised, so that the event loop keeps serving other requests.

Large requests have a few threads of their own: however long they take, small requests never wait for them. Tenants take
turns in these threads: a free one goes to the waiting tenant that holds the fewest, and among equals to the one that
has waited longest since its last turn.
"""

import asyncio
import contextvars
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")

#: A body up to this size is parsed on the event loop: switching threads would cost more than parsing.
INLINE_BYTES = 16 * 1024
#: A request with a larger body runs in the threads for large requests.
SMALL_BYTES = 64 * 1024
NUM_LARGE = 2
#: The tenant of the request that the current task serves.
TENANT: ContextVar[str] = ContextVar("tenant", default="")


class RequestThreads:
    """Belongs to one event loop."""

    def __init__(self, *, num_large: int = NUM_LARGE) -> None:
        self._large = ThreadPoolExecutor(num_large, thread_name_prefix="large-request")
        self._num_free = num_large
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def parse(self, read: Callable[[bytes], Result], raw: bytes) -> Result:
        """Call `read` with `raw`: on the event loop if `raw` is short, else in a thread."""
        if len(raw) <= INLINE_BYTES:
            return read(raw)
        return await self.run(partial(read, raw), num_bytes=len(raw))

    async def run(self, call: Callable[[], Result], *, num_bytes: int) -> Result:
        run = partial(contextvars.copy_context().run, call)
        loop = asyncio.get_running_loop()
        if num_bytes <= SMALL_BYTES:
            return await loop.run_in_executor(None, run)
        tenant = TENANT.get()
        await self._wait_for_turn(tenant)
        work: Future[Result] = self._large.submit(run)
        # A cancelled request leaves its thread busy: the turn ends with the work, not with the request.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end_turn, tenant))
        return await asyncio.wrap_future(work)

    async def _wait_for_turn(self, tenant: str) -> None:
        if self._num_free:
            self._begin_turn(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._end_turn(tenant)
            raise

    def _begin_turn(self, tenant: str) -> None:
        self._num_free -= 1
        self._running[tenant] += 1

    def _end_turn(self, tenant: str) -> None:
        self._num_free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        while self._num_free and self._waiting:
            self._pass_on(min(self._waiting, key=self._running.__getitem__))

    def _pass_on(self, tenant: str) -> None:
        """Give the tenant a free thread, unless its next request has left, and move it to the end of the line."""
        turns = self._waiting.pop(tenant)
        turn = turns.popleft()
        if turns:
            self._waiting[tenant] = turns
        if not turn.cancelled():
            self._begin_turn(tenant)
            turn.set_result(None)
