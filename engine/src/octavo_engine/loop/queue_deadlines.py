"""Deadlines by which waiting requests must have been started: the limit on queue time, kept beside the scheduler.

A deadline is sent with its request, and the core compares it with its own clock before each step, so a request whose
deadline has passed is never started. Parent and core share the machine's monotonic clock.
"""

import heapq
from collections.abc import Callable


class QueueDeadlines:
    """Deadlines by request, dropped once `is_waiting(id)` is False: the request was scheduled or has ended."""

    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        self._is_waiting = is_waiting
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, start_by_s: float) -> None:
        heapq.heappush(self._heap, (start_by_s, request_id))

    def pop_expired(self, now: float) -> list[str]:
        """Remove and return the waiting requests whose deadline is not after `now`, earliest deadline first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[1])
        return [request_id for request_id in expired if self._is_waiting(request_id)]

    def next_s(self) -> float | None:
        """Return the earliest deadline of a waiting request; None if no waiting request has one."""
        while self._heap and not self._is_waiting(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
