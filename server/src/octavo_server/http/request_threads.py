"""Threads in which requests are parsed, rendered and tokenised, so that the event loop keeps serving other requests.

Large requests have a few threads of their own: however long they take, small requests never wait for them.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")

#: A body up to this size is parsed on the event loop: switching threads would cost more than parsing.
INLINE_BYTES = 16 * 1024
#: A request with a larger body runs in the threads for large requests.
SMALL_BYTES = 64 * 1024
NUM_LARGE = 2


class RequestThreads:
    def __init__(self, *, num_large: int = NUM_LARGE) -> None:
        self._large = ThreadPoolExecutor(num_large, thread_name_prefix="large-request")

    async def parse(self, read: Callable[[bytes], Result], raw: bytes) -> Result:
        """Call `read` with `raw`: on the event loop if `raw` is short, else in a thread."""
        if len(raw) <= INLINE_BYTES:
            return read(raw)
        return await self.run(partial(read, raw), num_bytes=len(raw))

    async def run(self, call: Callable[[], Result], *, num_bytes: int) -> Result:
        executor = self._large if num_bytes > SMALL_BYTES else None
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(executor, partial(context.run, call))
