"""Requests whose grammar is being compiled, and the compiled grammars of running requests.

Grammars are compiled on the executor's threads; `on_done` is called on one of them, so that an idle engine loop can
sleep until a grammar is compiled.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from octavo_engine.wire.records import ErrorInfo

Prepare = Callable[[str], "Future[object]"]


@dataclass(slots=True)
class _Compilation:
    future: "Future[object]"
    deadline_s: float


class PendingGrammars:
    def __init__(self, prepare: Prepare, *, timeout_s: float) -> None:
        self.on_done: Callable[[], None] = _ignore
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._waiting: dict[str, _Compilation] = {}
        self._held: dict[str, object] = {}
        self._done: deque[str] = deque()  # filled by other threads

    def start(self, request_id: str, grammar: str, now: float) -> None:
        """Start compiling a request's grammar; if it is compiled already, `pop_done` returns it at the next call."""
        future = self._prepare(grammar)
        self._waiting[request_id] = _Compilation(future, now + self._timeout_s)
        future.add_done_callback(lambda _: self._on_future_done(request_id))

    def pop_done(self, now: float) -> list[tuple[str, ErrorInfo | None]]:
        """Return request ids and errors of the compilations that ended or timed out; the error is None on success.

        Requests that ended meanwhile are left out.
        """
        done = []
        while self._done:
            done.append(self._done.popleft())
        if not self._waiting:
            return []
        late = [i for i, w in self._waiting.items() if w.deadline_s <= now and not w.future.done()]
        return [(i, self._finish(i)) for i in done if i in self._waiting] + [(i, self._time_out(i)) for i in late]

    def has_done(self) -> bool:
        return bool(self._done)

    def forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._held.pop(request_id, None)

    def next_deadline_s(self) -> float | None:
        return min((w.deadline_s for w in self._waiting.values()), default=None)

    def wait_for_done(self, timeout_s: float) -> None:
        """Block until a grammar is compiled or the timeout has passed."""
        wait([w.future for w in self._waiting.values()], timeout_s, FIRST_COMPLETED)

    def _on_future_done(self, request_id: str) -> None:
        self._done.append(request_id)
        self.on_done()

    def _finish(self, request_id: str) -> ErrorInfo | None:
        future = self._waiting.pop(request_id).future
        error = future.exception()
        if error is None:
            self._held[request_id] = future.result()
            return None
        return ErrorInfo(f"The grammar of the output could not be compiled: {error}", "invalid_request")

    def _time_out(self, request_id: str) -> ErrorInfo:
        """Fail a request with an error of kind "internal": compilation continues, so that a retry may succeed."""
        del self._waiting[request_id]
        return ErrorInfo(
            f"The grammar of the output took longer to compile than {self._timeout_s:g} s: make the schemas, regex or "
            "grammar smaller, or raise --grammar-compile-timeout."
        )


def _ignore() -> None:
    """Do nothing: the default `on_done`, for an engine core whose caller waits with `wait_for_work`."""
