"""Requests that wait for work on other threads, such as compiling a grammar, and deadlines of queued requests.

`on_done` is called, on the thread of a finished work, to wake an idle engine loop.
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
    """A work for which a request waits. `describe_failure`: makes the request's error from the future's exception.

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
    """Return the work of compiling a grammar. It continues after the timeout, so that a retry may succeed."""
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
    """Requests and the works for which they wait. Results are kept until `forget`: a running request needs them."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = _ignore
        self._waiting: dict[str, Sequence[Work]] = {}
        self._held: dict[str, list[object]] = {}
        self._done: deque[str] = deque()  # ids of requests with some work done; filled by other threads

    def start(self, request_id: str, works: Sequence[Work]) -> None:
        """Let a request wait for `works`, and those of earlier calls. Once all are done, `pop_done` returns it."""
        self._waiting[request_id] = [*self._waiting.get(request_id, ()), *works]
        for work in works:
            work.future.add_done_callback(lambda _: self._on_future_done(request_id))

    def pop_done(self, now: float) -> list[tuple[str, ErrorInfo | None]]:
        """Return the requests whose works are all done, and, with an error, requests of a failed or late work.

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
    """Deadlines by which queued requests must have been started (the limit on queue time), kept beside the scheduler.

    A deadline arrives with its request, and the core checks it with its own clock before each step, so that a request
    is never started after its deadline. Parent and core use the same monotonic clock of the machine. A deadline is
    dropped once `is_waiting(id)` is False, because the request was scheduled or has ended.
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
