"""uvicorn's HTTP protocol with the timeouts that uvicorn lacks: for slow senders, slow readers and dead peers.

- The head of a request must be complete in time, counted from the opening of the connection or the request's first
  byte, and then its body. The application answers a late body itself (408); otherwise the connection is closed here.
- A response before the end of its request's body ends the connection, in two steps: closing it with unread bytes would
  reset it, and the client would lose the response. So first only the sending direction is closed (RFC 9112, 9.6).
- Beyond `max_connections` a new connection closes the one that has been without a request for longest, so that clients
  without a key can't take all memory. A connection with a request in progress is never closed for that.
- The connection of a client that doesn't read its response is aborted. Meanwhile no memory grows: uvicorn pauses a
  response while the socket's buffer is full, and a generation keeps one copy of its text however slowly it is read.
- A client of HTTP/1.0, which has no chunked encoding, gets a stream that ends with the connection.
- All bytes that one turn of the event loop writes are sent in one piece (`Cork`).
- A callback reports at once that the client disconnected, without a task that waits for it (`watch_disconnect`).
- TCP keep-alive detects a peer that vanished without closing the connection.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo_server.config import HttpSettings
from octavo_server.http.listener import detect_dead_peer
from octavo_server.http.request_framing import RequestFraming

logger = logging.getLogger(__name__)

#: Key of the connection's `TimeoutProtocol` in the `state` of a request's scope.
CONNECTION = "connection"
#: Key of the loop's time at which the request's first byte arrived, in the same `state`.
BEGUN_S = "begun_s"

#: Most time for a head: it is small, and while it arrives no key has been checked.
HEAD_TIMEOUT_S = 10.0
#: Added to the application's own limit for a late body, so that the application responds first.
BODY_GRACE_S = 5.0
#: Longest time between closing the sending direction and the connection; the client may still send its body.
LINGER_S = 5.0
#: A client that reads less than this within the timeout counts as not reading.
MIN_PROGRESS_BYTES = 16 * 1024


class TimeoutProtocol(RequestFraming):
    """Subclasses by `timeout_protocol` set the attributes without values. `idle`: the server's connections without a
    request in progress, the longest idle one first."""

    request_timeout_s: float
    slow_client_timeout_s: float
    max_connections: int
    idle: "dict[TimeoutProtocol, None]"

    _sender_timer: asyncio.TimerHandle | None = None  # for the client to send its request
    _reader_timer: asyncio.TimerHandle | None = None  # for the client to read the response
    _unread_bytes = 0
    _keeps_alive = False  # keep the connection after the response if the body is complete by then
    _begun_s = 0.0  # when the first byte of the latest request arrived
    _on_disconnect: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Cork(transport, self.loop, self._begin_linger)))
        detect_dead_peer(transport.get_extra_info("socket"), idle_s=60, interval_s=15)
        if len(self.connections) > self.max_connections and self.idle:
            self._close_longest_idle()
        self.idle[self] = None
        self._set_sender_timer(self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._sender_timer is None and self.timeout_keep_alive_task is None:
            self._set_sender_timer(self.timeout_keep_alive)  # an empty line cancels uvicorn's own timer

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        self._set_sender_timer(None)
        self._set_reader_timer(None)
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        super().connection_lost(exc)
        if on_disconnect is not None:
            on_disconnect()

    def watch_disconnect(self, on_disconnect: Callable[[], None] | None) -> None:
        """Call `on_disconnect` once when the client disconnects, until the next call of this method.

        Reading resumes meanwhile, as a paused connection doesn't notice the disconnect.
        """
        self._on_disconnect = on_disconnect
        if on_disconnect is not None:
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun_s = self.loop.time()
        self._set_sender_timer(min(self.request_timeout_s, HEAD_TIMEOUT_S))

    def begin_request(self) -> None:
        self.idle.pop(self, None)
        super().begin_request()
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False  # until `end_request`
        self.scope["state"].update({CONNECTION: self, BEGUN_S: self._begun_s})
        self._set_sender_timer(self.request_timeout_s + BODY_GRACE_S)

    def end_request(self) -> None:
        self._set_sender_timer(None)
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().end_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle[self] = None

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._set_reader_timer(self.slow_client_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_reader_timer(None)

    def _begin_linger(self) -> bool:
        """Return True if the client may still send the body of an answered request. Those bytes are ignored."""
        if not self._is_in_body or not self.cycle.response_complete:
            return False
        self._ignores_input = True
        self.flow.resume_reading()
        self.idle[self] = None
        self._set_sender_timer(LINGER_S)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, partial(_answer_unchunked, app, cycle) if is_old else app)

    def _set_sender_timer(self, timeout_s: float | None) -> None:
        if self._sender_timer is not None:
            self._sender_timer.cancel()
        self._sender_timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._on_slow_sender)

    def _set_reader_timer(self, timeout_s: float | None) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        self._reader_timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._on_slow_reader)

    def _close_longest_idle(self) -> None:
        oldest = next(iter(self.idle))
        del self.idle[oldest]
        logger.debug("%s: closing the connection, as there are more than %d", oldest.client, self.max_connections)
        oldest.transport.close()

    def _on_slow_sender(self) -> None:
        if self.flow.read_paused:  # the request may be complete but unread, as an earlier response is being sent
            self._set_sender_timer(self.request_timeout_s)
            return
        logger.debug("%s: the request was not complete in time: closing the connection", self.client)
        self.transport.close()

    def _on_slow_reader(self) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        if self._unread_bytes - unread_bytes >= MIN_PROGRESS_BYTES:
            self._unread_bytes = unread_bytes
            self._set_reader_timer(self.slow_client_timeout_s)
            return
        logger.info(
            "%s: the client has not read %d bytes for %g s: closing the connection",
            *(self.client, unread_bytes, self.slow_client_timeout_s),
        )
        self.transport.abort()


def timeout_protocol(settings: HttpSettings, on_refused_head: Callable[[str], None]) -> type[TimeoutProtocol]:
    """Return a protocol class with these settings, as uvicorn creates the instances.

    `on_refused_head`: called with the method of a request whose head is too large, which no application sees.
    """
    attributes = {
        "request_timeout_s": settings.limits.request_timeout,
        "slow_client_timeout_s": settings.slow_client_timeout,
        "max_connections": settings.max_connections,
        "idle": {},
        "on_refused_head": staticmethod(on_refused_head),
    }
    return type("Protocol", (TimeoutProtocol,), attributes)


async def _answer_unchunked(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Call the application without chunked encoding, which uvicorn would use for a response without a length."""
    has_length = False

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unchunked)


class Cork:
    """A transport that sends all bytes written in one turn of the event loop with one system call.

    uvicorn writes the head and the body of a response separately. Each write is a system call, wakes the client, and
    costs more than building the whole head.

    Attributes that are not defined here are those of the transport that it wraps.

    If `begin_linger` returns True, the first `close` closes only the sending direction, a second one everything.
    """

    __slots__ = ("_begin_linger", "_is_lingering", "_loop", "_parts", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, begin_linger: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._begin_linger = begin_linger
        self._is_lingering = False
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():  # uvloop raises once the connection is lost
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        self.flush()
        if self.is_closing() or not self._begin_linger():
            self._transport.close()
            return
        self._is_lingering = True
        if self._transport.can_write_eof():  # TLS can't
            self._transport.write_eof()

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._parts))
