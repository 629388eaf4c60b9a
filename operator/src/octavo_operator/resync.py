"""`Rounds`: what is done from time to time, and whenever something may have been missed.

A inventory, so that ghosts are forgotten and a watch that went deaf is noticed; and all services looked at anew, by
whoever leads. While there is doubt, as at the start and after an outage, no service is given out: on half a view, one
would make again what is there, or what was deleted with its service.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from octavo_operator.cluster.client import ApiError
from octavo_operator.cluster.inventory import Inventory
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.view import Key, View
from octavo_operator.kopf_runner import KopfRunner

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVERY_S = 300.0
RETRY_S = 0.5  # after a failure
MIN_INTERVAL_S = 0.5  # at least, between two counts: the watches go on telling; longer where counting itself takes long
STALLED_WATCH_S = 10.0  # without anything new: a watch that hasn't told by then never will
MAX_HOLD_S = 30.0  # the same: doubt for longer would do more harm than it prevents


async def retry_until_ok(ask: Callable[[], Awaitable[T]]) -> T:
    """Until it is answered; what is in the way is said once."""
    said = ""
    while True:
        try:
            return await ask()
        except ApiError as error:
            if str(error) != said:
                said = str(error)
                logger.warning("waiting, as nothing can be done yet: %s", said)
        await asyncio.sleep(RETRY_S)


class Resync:
    def __init__(
        self,
        inventory: Inventory,
        view: View,
        queue: WorkQueue[Key],
        *,
        leadership: Leadership,
        watches: KopfRunner,
        on_requeue: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_requeue`: after whoever leads has queued all services anew."""
        self._on_turn = on_requeue
        self._inventory = inventory
        self._view = view
        self._queue = queue
        self._leadership = leadership
        self._watches = watches
        self._clock = clock
        self._stale = asyncio.Event()
        self._took_s = 0.0  # by the last inventory, once it could be taken
        self._stale_since_s = self._progressed_s = self._restarted_s = self.compared_s = clock()
        self.is_synced = asyncio.Event()
        self.mark_stale()

    def mark_stale(self) -> None:
        """Something may have been missed: nothing is given out until a census says otherwise."""
        if not self._stale.is_set():
            self._stale.set()
            self._stale_since_s = self._clock()
            self._queue.pause()

    async def compare_until_cancelled(self) -> None:
        """Until it is cancelled. Watches that go on bringing what is missing aren't deaf, however long it takes."""
        missing: set[str] = set()
        while True:
            self._stale.clear()
            before, missing = missing, await self._compare()
            self.compared_s = now = self._clock()
            if missing != before:
                self._progressed_s = now
            still_s = now - max(self._stale_since_s, self._progressed_s)
            if missing and min(still_s, now - self._restarted_s) > STALLED_WATCH_S:
                logger.warning("%d objects are there of which no watch has told: watching anew", len(missing))
                self._watches.restart()
                self._restarted_s = now
            if not self._stale.is_set() and (not missing or still_s > MAX_HOLD_S):
                self._queue.resume()
                self.is_synced.set()
            if not missing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._stale.wait()
            await asyncio.sleep(max(MIN_INTERVAL_S, 3 * self._took_s))

    async def requeue_until_cancelled(self) -> None:
        """All services, at the beginning of each time that we lead and from then on now and again."""
        while True:
            await self._leadership.gained.wait()
            for key in self._view.services:
                self._queue.add(key)
            await self._on_turn()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._leadership.lost.wait()

    async def _compare(self) -> set[str]:
        """What isn't in the view. A kind that was gone meanwhile isn't watched any more, though it is back."""
        was_gone = False

        async def take() -> set[str]:
            nonlocal was_gone
            began_s = self._clock()
            try:
                found = await self._inventory.find_missing()
                self._took_s = self._clock() - began_s
                return found
            except ApiError as error:
                was_gone = was_gone or error.is_gone
                raise

        missing = await retry_until_ok(take)
        if was_gone:
            self._watches.restart()
        return missing
