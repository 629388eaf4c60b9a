"""`Leadership`: leader election by a Lease (coordination.k8s.io/v1), as in client-go; only the holder writes.

A holder may not notice that it has lost the Lease. So it checks `may_write` before each write, which is False after a
deadline. The holder measures the deadline by its monotonic clock from before the latest renewal request; the deadline
is earlier than the time at which another operator may acquire the Lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.timestamps import now_text

logger = logging.getLogger(__name__)

DURATION_S = 15
DEADLINE_S = 10
RENEWAL_S = 5.0  # a renewal that takes longer is cancelled, which leaves time for another attempt
RETRY_S = 2.0
MARGIN_S = 0.05


class Leadership:
    """`clock`: monotonic seconds. `on_gap`: called when watch events may have been missed, as after an outage."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        on_gap: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._clock = clock
        self._on_doubt = on_gap
        self._writes_until = float("-inf")
        self._is_retired = False
        self._trouble = ""
        self.checked_s = clock()  # time of the last attempt to read or renew the Lease
        self._seen: tuple[str, float] = ("", 0.0)  # the holder's latest renewal, and when this process first saw it
        self._duration_s = float(DURATION_S)  # leaseDurationSeconds that the holder has set
        self.gained = asyncio.Event()
        self.lost = asyncio.Event()

    @property
    def may_write(self) -> bool:
        return self._clock() < self._writes_until and not self._is_retired

    def retire(self) -> None:
        """Allow no new writes, and hold the Lease until `run` is cancelled, so that writes in progress finish first."""
        self._is_retired = True

    async def run(self) -> None:
        """Acquire and renew the Lease until cancelled, then release it at once."""
        try:
            while True:
                await self.try_once()
                await asyncio.sleep(self._pause_s())
        finally:
            if self.gained.is_set():
                self.retire()
                await asyncio.shield(self._release())

    def _pause_s(self) -> float:
        """Seconds until the next attempt: without the Lease, until it may have expired, so that a takeover is quick."""
        left_s = self._seen[1] + self._duration_s - self._clock()
        return RETRY_S if self.gained.is_set() or left_s < 0 else min(RETRY_S, left_s + MARGIN_S)

    async def try_once(self) -> None:
        asked = self._clock()
        try:
            async with asyncio.timeout(RENEWAL_S):
                held = await self._acquire_or_renew()
        except (ApiError, TimeoutError) as error:
            self._log_error(str(error) or f"no answer within {RENEWAL_S:g} s")
            held = False
            self._on_doubt()
        self.checked_s = self._clock()
        has_lapsed = not self._clock() < self._writes_until
        if has_lapsed and self.gained.is_set():  # even if renewed since: another operator may have written
            logger.warning("%s leads no longer", self.identity)
            self.gained.clear()
            self.lost.set()
            self._on_doubt()
        if held:
            self._trouble = ""
            self._writes_until = asked + DEADLINE_S
            if not self.gained.is_set():
                logger.info("%s leads from now on", self.identity)
                self.lost.clear()
                self.gained.set()

    def _log_error(self, why: str) -> None:
        """Log an error unless it equals the previous one."""
        if why != self._trouble:
            logger.warning("the Lease %s/%s can't be read or renewed: %s", self._namespace, self._name, why)
        self._trouble = why

    async def _acquire_or_renew(self) -> bool:
        try:
            lease = await self._cluster.read("Lease", self._namespace, self._name)
        except ApiError as error:
            if not error.is_gone:
                raise
            return await self._cluster.create(self._manifest({}, transitions=0))
        spec = lease.get("spec") or {}
        holder, transitions = spec.get("holderIdentity") or "", spec.get("leaseTransitions") or 0
        if holder != self.identity:
            if holder and not self._is_expired(spec):
                return False
            transitions += 1
        lease["spec"] = self._spec(spec if holder == self.identity else {}, transitions=transitions)
        try:
            await self._cluster.replace(lease)
        except ApiError as error:
            if not error.is_conflict:
                raise
            return False
        return True

    def _is_expired(self, spec: dict[str, Any]) -> bool:
        """Return whether the holder's latest renewal was first seen too long ago, by this process's clock alone: clocks
        of machines are never compared."""
        renewal = f"{spec.get('holderIdentity')} {spec.get('renewTime')}"
        if self._seen[0] != renewal:
            self._seen = (renewal, self._clock())
        self._duration_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
        return self._clock() - self._seen[1] > self._duration_s

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(RENEWAL_S):
                lease = await self._cluster.read("Lease", self._namespace, self._name)
                if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._cluster.replace(lease)
        except (ApiError, TimeoutError) as error:
            logger.warning("the lease %s/%s can't be released: %s", self._namespace, self._name, error)

    def _manifest(self, before: dict[str, Any], *, transitions: int) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec(before, transitions=transitions),
        }

    def _spec(self, before: dict[str, Any], *, transitions: int) -> dict[str, Any]:
        now = now_text("microseconds")
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": before.get("acquireTime") or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
