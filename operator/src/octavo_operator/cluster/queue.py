"""`WorkQueue`: the services to reconcile next, as in client-go.

A key that is added twice is returned once. A failed key is returned again after a growing delay; other keys don't wait.
"""

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


class WorkQueue(Generic[K]):
    """Only one worker has a key at a time. A key that is added while a worker has it is returned again afterwards."""

    def __init__(self) -> None:
        self._waiting: dict[K, None] = {}  # in the order of adding
        self._busy: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._is_paused = False
        self._added = asyncio.Event()
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    async def wait_idle(self) -> None:
        """Wait until no worker has any key. Keys may still be queued."""
        while self._busy:
            self._idle.clear()
            await self._idle.wait()

    def add(self, key: K) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._busy:
            self._again.add(key)
        else:
            self._waiting[key] = None
            self._added.set()

    def add_later(self, key: K, delay_s: float) -> None:
        """Add the key after the delay, unless it is added earlier."""
        loop, before = asyncio.get_running_loop(), self._timers.get(key)
        if key in self._waiting or (before is not None and before.when() <= loop.time() + delay_s):
            return
        if before is not None:
            before.cancel()
        self._timers[key] = loop.call_later(delay_s, self._due, key)

    def pause(self) -> None:
        """Make `get` wait until `resume` is called; added keys are queued."""
        self._is_paused = True

    def resume(self) -> None:
        """Let `get` return keys again, delayed keys at once."""
        self._is_paused = False
        for key in list(self._timers):
            self.add(key)
        self._added.set()

    async def get(self) -> K:
        while self._is_paused or not self._waiting:
            self._added.clear()
            await self._added.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._busy.add(key)
        return key

    def done(self, key: K) -> None:
        self._failures.pop(key, None)
        self._finish(key)

    def failed(self, key: K) -> float:
        """End the work on a key that failed: queue it again after a delay, and return the delay in seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(FIRST_RETRY_S * 2.0 ** (count - 1), LAST_RETRY_S)
        self._finish(key)
        self.add_later(key, delay_s)
        return delay_s

    def _finish(self, key: K) -> None:
        self._busy.discard(key)
        if not self._busy:
            self._idle.set()
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)
