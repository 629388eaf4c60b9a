"""`WholeProtocol`: small requests that come at once are offered to the application whole, before ASGI sees them.

A task, its scope, messages and timers cost more than all that a proxy does with a small request. So whoever is named
by `take` may answer one by callbacks alone (`Taken`). What isn't offered (other paths, a body that is long or comes
late, an old or a closing connection), isn't taken, or turns out to need more than that, goes the ordinary way, through
uvicorn, from wherever it is: nobody sees a difference but in what it costs.
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, cast

from octavo_engine.log_format import REQUEST_ID
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from octavo_server.http.cork import Cork
from octavo_server.http.protocol import CONNECTION, MAX_HEAD_BYTES, PatientProtocol

Headers = list[tuple[bytes, bytes]]

#: In the state of a request's scope: the `Taken` that was handed over, if there is one.
TAKEN = "taken"
#: A body may come this much later than its head: many clients write them apart.
HELD_S = 0.05


class Taken(Protocol):
    """A request that is being answered without ASGI. It ends by `WholeProtocol.answer` or `hand_over`, or here."""

    path: bytes
    headers: Headers
    body: bytes
    request_id: str

    def hand_over(self) -> None:
        """`WholeProtocol.hand_over`, when nothing comes to it any more."""
        ...

    def client_left(self) -> None: ...


class WholeProtocol(PatientProtocol):
    """`take` and those below it are set in a subclass. `paths`: as they are in requests."""

    take: ClassVar[Callable[["WholeProtocol", bytes, Headers, bytes], Taken | None]]
    paths: ClassVar[frozenset[bytes]]
    max_body_bytes: ClassVar[int]

    _taken: Taken | None = None
    _is_held = False  # its end isn't there yet, and uvicorn doesn't know of it
    _body = b""
    _holding: asyncio.TimerHandle | None = None
    _idle: asyncio.TimerHandle | None = None  # since an answer of ours; one for many requests
    _idle_since_s = 0.0
    _is_last = False

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Of the request that was taken."""
        assert self._taken is not None, "there is nothing to answer"
        if self.access_log:
            self._log(self._taken, status)
        self._taken = None
        parts = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n", body)
        cast(Cork, self.transport).write_now(b"".join(parts))
        self.server_state.total_requests += 1
        if self._is_last:
            self.transport.close()
            return
        self._idle_since_s = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._look_if_idle)

    def hand_over(self) -> None:
        """What was taken goes on through ASGI; `TAKEN` tells the application."""
        taken, self._taken = self._taken, None
        assert taken is not None, "there is nothing to hand over"
        self._begin(taken.path, taken.headers)
        self.scope["state"][TAKEN] = taken
        self.cycle.keep_alive = not self._is_last
        self._end(taken.body)

    @property
    def is_behind(self) -> bool:
        """The client doesn't read: an answer has to wait."""
        return self.flow.write_paused

    def data_received(self, data: bytes) -> None:
        self._read_bytes = len(data)
        HttpToolsProtocol.data_received(self, data)
        if self._taken is not None:
            return
        if self._is_held:
            self._hold()
            return
        if self._is_in_head:
            if not self._head_bytes:
                self._expect(self.request_timeout_s)
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_head()
                return
        if self._sending is None and self.timeout_keep_alive_task is None and self._idle is None and self._is_free:
            self._expect(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        taken, self._taken = self._taken, None
        if self._idle is not None:
            self._idle.cancel()
        if self._is_held:
            self._let_go()
        super().connection_lost(exc)
        if taken is not None:
            taken.client_left()

    def shutdown(self) -> None:
        if self._is_held:
            self._let_go()
        if self._taken is None:
            super().shutdown()
        else:
            self._is_last = True

    def on_message_begin(self) -> None:
        """uvicorn's is called when it is to know of the request."""
        if self._taken is not None:  # uvicorn keeps requests in their order
            self._taken.hand_over()
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._refuse_whole_head()
        if self.url in self.paths and self._may_be_held():
            self._is_held, self._body = True, b""
            return
        self._begin(self.url, self.headers)
        self._expect_body()

    def on_body(self, body: bytes) -> None:
        if self._is_held:
            self._body = self._body + body if self._body else body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._sending is not None:
            self._expect(None)
        if not self._is_held:
            super().on_message_complete()
            return
        self._is_held = False
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        body, self._body = self._body, b""
        taken = self._taken = type(self).take(self, self.url, self.headers, body)
        if taken is None:
            self._begin(self.url, self.headers)
            self._end(body)

    @property
    def _is_free(self) -> bool:
        """No request is being answered."""
        return self._taken is None and (self.cycle is None or self.cycle.response_complete)

    def _may_be_held(self) -> bool:
        parser = self.parser
        return (
            self._is_free
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
        )

    def _hold(self) -> None:
        if len(self._body) > self.max_body_bytes:
            self._let_go()
        elif self._holding is None:
            self._holding = self.loop.call_later(HELD_S, self._let_go)

    def _let_go(self) -> None:
        """Its end isn't there yet."""
        self._is_held = False
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        body, self._body = self._body, b""
        self._begin(self.url, self.headers)
        if body:
            super().on_body(body)
        self._expect_body()

    def _begin(self, url: bytes, headers: Headers) -> None:
        expects = self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)  # the scope has the list
        HttpToolsProtocol.on_headers_complete(self)
        self.scope["state"][CONNECTION] = self

    def _end(self, body: bytes) -> None:
        if body:
            super().on_body(body)
        super().on_message_complete()

    def _look_if_idle(self) -> None:
        """Whoever is answered anew begins anew."""
        self._idle = None
        if not self._is_free or self._sending is not None or self.timeout_keep_alive_task is not None:
            return
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle = self.loop.call_later(left_s, self._look_if_idle)
        else:
            self.timeout_keep_alive_handler()

    def _log(self, taken: Taken, status: int) -> None:
        """As uvicorn does."""
        scope: Any = {"client": self.client, "path": taken.path.decode("ascii"), "query_string": b""}
        path = get_path_with_query_string(scope)
        mark = REQUEST_ID.set(taken.request_id)
        self.access_logger.info('%s - "%s %s HTTP/%s" %d', get_client_addr(scope), "POST", path, "1.1", status)
        REQUEST_ID.reset(mark)


def whole(
    take: Callable[[WholeProtocol, bytes, Headers, bytes], Taken | None],
    *,
    paths: frozenset[bytes],
    max_body_bytes: int,
) -> type[WholeProtocol]:
    settings = {"take": staticmethod(take), "paths": paths, "max_body_bytes": max_body_bytes}
    return type("Protocol", (WholeProtocol,), settings)
