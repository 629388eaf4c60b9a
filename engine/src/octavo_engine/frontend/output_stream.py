"""`OutputStream`: a request of `AsyncLLM` in flight."""

import asyncio

from octavo_engine.frontend.assembly import RequestAssembly


class OutputStream:
    """One request in flight: its assembly, and a signal to its only reader that output has arrived."""

    __slots__ = ("_has_output", "_loop", "_waiter", "assembly")

    def __init__(self, assembly: RequestAssembly) -> None:
        self.assembly = assembly
        self._loop = asyncio.get_running_loop()
        self._has_output = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def core_id(self) -> str:
        return self.assembly.request.request_id

    def notify(self) -> None:
        self._has_output = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_for_output(self) -> None:
        """Wait for the next output. As this runs for every token, it avoids the waiter list of an asyncio.Event."""
        if not self._has_output:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._has_output = False
