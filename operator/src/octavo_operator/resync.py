"""`Resync`: compares the view with the cluster and requeues all services, periodically and after a possible gap.

The comparison removes objects from the view whose deletion no watch has reported, and detects a watch that delivers no
events. While the view may be incomplete, as at the start and after an outage, the work queue is paused: a plan made
from half a view would create objects that exist already, or objects that were deleted together with their service.
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
RETRY_S = 0.5
MIN_INTERVAL_S = 0.5  # between two comparisons, for the watches to deliver objects; longer if comparisons take long
STALLED_WATCH_S = 10.0  # if the watches deliver no missing object for so long, they never will and are restarted
MAX_HOLD_S = 30.0  # if they still deliver none after so long, the queue runs again: pausing it would do more harm


async def retry_until_ok(ask: Callable[[], Awaitable[T]]) -> T:
    """Call `ask` until it raises no ApiError, and return its result; log an error unless it equals the previous one."""
    logged = ""
    while True:
        try:
            return await ask()
        except ApiError as error:
            if str(error) != logged:
                logged = str(error)
                logger.warning("the Kubernetes API can't be used yet, trying again: %s", logged)
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
        """`on_requeue`: called each time that this operator, as the leader, has queued all services."""
        self._on_requeue = on_requeue
        self._inventory = inventory
        self._view = view
        self._queue = queue
        self._leadership = leadership
        self._watches = watches
        self._clock = clock
        self._stale = asyncio.Event()
        self._duration_s = 0.0  # duration of the last successful comparison
        self._stale_since_s = self._progressed_s = self._restarted_s = self.compared_s = clock()
        self.is_synced = asyncio.Event()
        self.mark_stale()

    def mark_stale(self) -> None:
        """Pause the work queue until a comparison shows that the view is complete, as events may have been missed."""
        if not self._stale.is_set():
            self._stale.set()
            self._stale_since_s = self._clock()
            self._queue.pause()

    def add_kind(self, kind: str) -> None:
        """Compare and watch one more kind, which was missing when the watches started; then requeue all services."""
        self._inventory.add_kind(kind)
        self._watches.restart()
        self.mark_stale()
        for key in self._view.services:
            self._queue.add(key)

    async def compare_until_cancelled(self) -> None:
        """Compare periodically, and restart the watches if they deliver no more of the objects that the view lacks."""
        missing: set[str] = set()
        while True:
            self._stale.clear()
            before, missing = missing, await self._compare()
            self.compared_s = now = self._clock()
            if missing != before:
                self._progressed_s = now
            stalled_s = now - max(self._stale_since_s, self._progressed_s)
            if missing and min(stalled_s, now - self._restarted_s) > STALLED_WATCH_S:
                logger.warning("the watches have not delivered %d existing objects and are restarted", len(missing))
                self._watches.restart()
                self._restarted_s = now
            if not self._stale.is_set() and (not missing or stalled_s > MAX_HOLD_S):
                self._queue.resume()
                self.is_synced.set()
            if not missing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._stale.wait()
            await asyncio.sleep(max(MIN_INTERVAL_S, 3 * self._duration_s))

    async def requeue_until_cancelled(self) -> None:
        """Queue all services whenever this operator becomes the leader, and every `EVERY_S` while it leads."""
        while True:
            await self._leadership.gained.wait()
            for key in self._view.services:
                self._queue.add(key)
            await self._on_requeue()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._leadership.lost.wait()

    async def _compare(self) -> set[str]:
        """Return the uids that the view lacks. If the CRD of a kind was missing meanwhile, restart the watches, as kopf
        has dropped the watch of this kind."""
        was_gone = False

        async def find() -> set[str]:
            nonlocal was_gone
            began_s = self._clock()
            try:
                missing = await self._inventory.find_missing()
                self._duration_s = self._clock() - began_s
                return missing
            except ApiError as error:
                was_gone = was_gone or error.is_gone
                raise

        missing = await retry_until_ok(find)
        if was_gone:
            self._watches.restart()
        return missing
