"""Requests that wait: for work beside the steps, such as a grammar or an adapter, and for a place until their deadline.

Work runs on other threads. `on_done` is called on one of them, so that an idle engine loop can sleep until then.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from octavo_engine.wire.errors import InvalidRequest, Unavailable
from octavo_engine.wire.records import ErrorInfo


@dataclass(frozen=True, slots=True)
class Work:
    """One thing that a request waits for. `describe_failure`: makes the request's error from the future's exception.

    `late`: the request's error if the future is not done by `deadline_s`.
    """

    future: "Future[object]"
    describe_failure: Callable[[BaseException], ErrorInfo]
    deadline_s: float = math.inf
    late: ErrorInfo | None = None

    def error(self, now: float) -> ErrorInfo | None:
        """Return why the request must end, or None."""
        if not self.future.done():
            return self.late if self.deadline_s <= now else None
        failure = self.future.exception()
        return None if failure is None else self.describe_failure(failure)


def error_info(error: BaseException) -> ErrorInfo:
    """Return the error, with its status, of a request that has failed before it ran."""
    if isinstance(error, Unavailable):
        return ErrorInfo(str(error), "unavailable")
    return ErrorInfo(str(error), "invalid_request" if isinstance(error, InvalidRequest) else "internal")


def grammar_work(future: "Future[object]", *, now: float, timeout_s: float) -> Work:
    """Return the wait for a grammar's compilation, which continues after the timeout, so that a retry may succeed."""
    late = (
        f"The grammar of the output took longer to compile than {timeout_s:g} s: make the schemas, regex or grammar "
        "smaller, or raise --grammar-compile-timeout."
    )
    return Work(
        future,
        lambda error: ErrorInfo(f"The grammar of the output could not be compiled: {error}", "invalid_request"),
        now + timeout_s,
        ErrorInfo(late, "internal"),
    )


def image_work(future: "Future[object]", number: int) -> Work:
    """Return the wait for a processed image, the `number`th of its request."""
    return Work(
        future,
        lambda error: replace(info := error_info(error), message=f"Image {number} of the prompt: {info.message}"),
    )


class PendingRequests:
    """Requests and the works that they wait for. A request's results are kept until `forget`, as long as it may run."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = _ignore
        self._waiting: dict[str, Sequence[Work]] = {}
        self._held: dict[str, list[object]] = {}
        self._done: deque[str] = deque()  # ids of requests with some work done; filled by other threads

    def start(self, request_id: str, works: Sequence[Work]) -> None:
        """Let a request wait for these works and those of earlier calls. When all are done, `pop_done` returns it."""
        self._waiting[request_id] = [*self._waiting.get(request_id, ()), *works]
        for work in works:
            work.future.add_done_callback(lambda _: self._on_future_done(request_id))

    def pop_done(self, now: float) -> list[tuple[str, ErrorInfo | None]]:
        """Return the requests whose works are all done, and those with a failed or late work.

        The error is None on success. Requests that ended meanwhile are left out.
        """
        ids = []
        while self._done:
            ids.append(self._done.popleft())
        if not self._waiting:
            return []
        ids += [i for i, works in self._waiting.items() if any(work.deadline_s <= now for work in works)]
        ended = []
        for request_id in dict.fromkeys(i for i in ids if i in self._waiting):
            works = self._waiting[request_id]
            errors = [error for work in works if (error := work.error(now)) is not None]
            if not errors and not all(work.future.done() for work in works):
                continue
            del self._waiting[request_id]
            if not errors:
                self._held.setdefault(request_id, []).extend(work.future.result() for work in works)
            ended.append((request_id, errors[0] if errors else None))
        return ended

    def has_done(self) -> bool:
        return bool(self._done)

    def forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._held.pop(request_id, None)

    def next_deadline_s(self) -> float | None:
        deadlines = [work.deadline_s for works in self._waiting.values() for work in works if not work.future.done()]
        return min((s for s in deadlines if s < math.inf), default=None)

    def futures(self) -> "list[Future[object]]":
        """Return the futures of all work that is not done."""
        return [work.future for works in self._waiting.values() for work in works if not work.future.done()]

    def _on_future_done(self, request_id: str) -> None:
        self._done.append(request_id)
        self.on_done()


def _ignore() -> None:
    """Do nothing: the default `on_done`, for an engine core whose caller waits with `wait_for_work`."""


class QueueDeadlines:
    """Deadlines by which waiting requests must have been started: the limit on queue time, kept beside the scheduler.

    A deadline is sent with its request, and the core compares it with its own clock before each step, so a request
    whose deadline has passed is never started. Parent and core share the machine's monotonic clock. A deadline is
    dropped once `is_waiting(id)` is False: the request was scheduled or has ended.
    """

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
