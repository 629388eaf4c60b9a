"""`SleepControl`: puts server and engine to sleep and wakes them, one call after another."""

import asyncio
from collections.abc import Iterable

from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.wire.sleep import SleepMode

from octavo_server.http.lifecycle import Lifecycle
from octavo_server.openai.errors import Conflict


class SleepControl:
    """The lifecycle refuses requests from the beginning of `sleep` until all memory is restored."""

    def __init__(self, client: AsyncLLM, lifecycle: Lifecycle) -> None:
        self._client = client
        self._lifecycle = lifecycle
        self._lock = asyncio.Lock()
        self._waiting: asyncio.Task[None] | None = None

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Sleep after the running requests have ended. Raises Conflict if `wake_up` is called while they finish."""
        if mode == "abort" and self._waiting is not None:  # an earlier call waits for the requests that this one ends
            self._lifecycle.fall_asleep(ends_requests=True)
        async with self._lock:
            self._lifecycle.fall_asleep(ends_requests=mode == "abort")
            if mode == "wait":
                await self._finish_requests()
            await self._client.sleep(level)

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """Wake the engine; accept requests if no memory is missing. A sleep that waits for requests is cancelled."""
        if self._waiting is not None:
            self._waiting.cancel()
        async with self._lock:
            await self._client.wake_up(tags)
            if not self._client.sleeping_tags:
                self._lifecycle.wake_up()

    async def _finish_requests(self) -> None:
        waiting = self._waiting = asyncio.create_task(self._lifecycle.drained())
        try:
            await asyncio.wait({waiting})
        finally:
            self._waiting = None
            waiting.cancel()  # it has no effect unless this call itself is cancelled
        if waiting.cancelled():
            raise Conflict("The server was woken before its requests had finished: call /sleep again.")
