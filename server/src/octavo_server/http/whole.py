"""`Front`: small requests that come at once are offered to the application whole, before uvicorn sees them.

A task, its scope, messages and timers cost more than all that a proxy does with a small request. So whoever is named
by `Offer.take` may answer one by callbacks alone (`Taken`). What isn't offered (other paths, unusual heads, a body that
is long or comes late, a closing connection), isn't taken, or turns out to need more than that, goes the ordinary way:
its bytes go to uvicorn, as they came. Nobody sees a difference but in what it costs.

The transport's protocol is the `Front`. It is compiled for the router's image, which a subclass of uvicorn's can't be.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from octavo_server.http.cork import Cork
from octavo_server.http.plain_head import Headers, PlainHeads

if TYPE_CHECKING:
    from octavo_server.http.fronted import FrontedProtocol

#: A body may come this much later than its head: many clients write them apart.
HELD_S = 0.05


class Taken(Protocol):
    """A request that is being answered without ASGI. It ends by `Front.answer` or `hand_over`, or here."""

    path: bytes
    request_id: str

    def hand_over(self) -> None:
        """`Front.hand_over`, when nothing comes to it any more."""
        ...

    def client_left(self) -> None: ...


class Offer:
    """What one server's connections have in common. `take`: gets path, headers and body, and may decline."""

    __slots__ = ("_usual", "_usual_of", "heads", "max_body_bytes", "take")

    def __init__(
        self,
        take: "Callable[[Front, bytes, Headers, bytes], Taken | None]",
        *,
        paths: frozenset[bytes],
        max_body_bytes: int,
    ) -> None:
        self.take = take
        self.heads = PlainHeads(paths)
        self.max_body_bytes = max_body_bytes
        self._usual = b""
        self._usual_of: Headers = []

    def usual(self, headers: Headers) -> bytes:
        """The lines of what uvicorn adds to each answer: another list each second."""
        if headers is not self._usual_of:
            self._usual_of = headers
            self._usual = b"".join([b"%b: %b\r\n" % field for field in headers])
        return self._usual


class Front:
    """States: idle, held (the end of a request isn't there yet), taken (one is being answered), or uvicorn's."""

    __slots__ = (
        *("_held", "_holding", "_idle", "_idle_since_s", "_inner", "_inner_waits"),
        *("_offer", "_request", "_taken", "is_behind", "is_last", "loop", "transport"),
    )

    def __init__(self, offer: Offer, inner: "FrontedProtocol", cork: Cork, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = cork
        self.loop = loop
        self.is_behind = False  # the client doesn't read: an answer has to wait
        self.is_last = False  # what is being answered
        self._offer = offer
        self._inner = inner
        self._inner_waits = True  # it may have a timer for the next request
        self._taken: Taken | None = None
        self._request = b""  # what is taken
        self._held = b""
        self._holding: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None  # since an answer of ours; one for many requests
        self._idle_since_s = 0.0

    @property
    def is_answering(self) -> bool:
        return self._taken is not None

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Of the request that was taken."""
        taken, inner = self._taken, self._inner
        assert taken is not None, "there is nothing to answer"
        if inner.access_log:
            inner.log(taken.path, taken.request_id, status)
        self._taken, self._request = None, b""
        state: Any = inner.server_state
        parts = [STATUS_LINE[status], self._offer.usual(state.default_headers)]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n", body)
        self.transport.write_now(b"".join(parts))
        state.total_requests += 1
        if self.is_last:
            self.transport.close()
            return
        self._idle_since_s = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(inner.timeout_keep_alive, self._look_if_idle)

    def hand_over(self) -> None:
        """What was taken goes on through ASGI."""
        taken, request = self._taken, self._request
        assert taken is not None, "there is nothing to hand over"
        self._taken, self._request = None, b""
        self._inner_waits = True
        self._inner.go_on(request, taken, is_last=self.is_last)

    def let_go(self) -> None:
        """The end of what is held isn't there yet, or won't come."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        held, self._held = self._held, b""
        if held:
            self._pass_on(held)

    # The transport calls these.

    def data_received(self, data: bytes) -> None:
        if self._taken is not None:  # uvicorn keeps requests in their order
            self._taken.hand_over()
        if self._inner.is_between_requests:
            whole = self._held + data if self._held else data
            if self._is_accepted(whole):
                return
        self.let_go()
        self._pass_on(data)

    def eof_received(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self.let_go()
        taken, self._taken = self._taken, None
        self._inner.connection_lost(exc)
        if taken is not None:
            taken.client_left()

    def pause_writing(self) -> None:
        self.is_behind = True
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self.is_behind = False
        self._inner.resume_writing()

    def _is_accepted(self, data: bytes) -> bool:
        """Taken or held."""
        offer = self._offer
        head_bytes = offer.heads.begins(data)
        head = offer.heads.read(data[:head_bytes]) if head_bytes else None
        if head is None or head.body_bytes > offer.max_body_bytes:
            return False
        missing_bytes = head_bytes + head.body_bytes - len(data)
        if missing_bytes > 0:
            self._hold(data)
        elif missing_bytes == 0:
            return self._is_taken(data, head.path, head.headers, data[head_bytes:])
        return missing_bytes > 0

    def _is_taken(self, data: bytes, path: bytes, headers: Headers, body: bytes) -> bool:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        self._request = data
        self._taken = self._offer.take(self, path, headers, body)
        if self._taken is None:
            self._request = b""
            return False
        self._held = b""
        if self._inner_waits:
            self._inner_waits = False
            self._inner.wait_no_more()
        return True

    def _hold(self, data: bytes) -> None:
        self._held = data
        if self._holding is None:
            self._holding = self.loop.call_later(HELD_S, self.let_go)

    def _pass_on(self, data: bytes) -> None:
        self._inner_waits = True
        self._inner.data_received(data)

    def _look_if_idle(self) -> None:
        """Whoever is answered anew begins anew."""
        self._idle = None
        if self._taken is not None or self._held or self._inner_waits:
            return
        left_s = self._idle_since_s + self._inner.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle = self.loop.call_later(left_s, self._look_if_idle)
        else:
            self.transport.close()
