"""`SleepSwitch`: puts an engine core in another process to sleep, and stores which of its memory is released."""

import asyncio
from collections.abc import Iterable

from octavo_engine.process.client import CoreProcess
from octavo_engine.wire.sleep import MemoryTag

#: Loading a large model from a slow disk takes minutes. A dead core ends the call at once.
CALL_TIMEOUT_S = 1800.0


class SleepSwitch:
    """`tags`: memory that the core has given back, or is about to. Calls are served one after another."""

    def __init__(self, core: CoreProcess) -> None:
        self.tags: set[MemoryTag] = set()
        self._core = core
        self._lock = asyncio.Lock()

    @property
    def is_switching(self) -> bool:
        return self._lock.locked()

    async def sleep(self, tags: Iterable[MemoryTag]) -> None:
        async with self._lock:
            self.tags |= set(tags)  # no request is sent from now on
            await self._core.call("sleep", [*tags], timeout_s=CALL_TIMEOUT_S)

    async def wake_up(self, tags: Iterable[MemoryTag]) -> None:
        """Wake one tag after another. Raises Unavailable for a tag that can't be restored: it still sleeps."""
        async with self._lock:
            for tag in tags:
                await self._core.call("wake_up", [tag], timeout_s=CALL_TIMEOUT_S)
                self.tags.discard(tag)
