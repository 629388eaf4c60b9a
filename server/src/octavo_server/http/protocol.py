"""uvicorn's HTTP protocol with the timeouts that uvicorn lacks: for slow senders, slow readers and dead peers.

- The head of a request has to be complete in time, from the connection's first moment or the request's first byte, and
  then its body. The application answers a late body itself (408); what it leaves behind is cut off here.
- A client that doesn't read what it asked for is cut off. Meanwhile nothing piles up: uvicorn holds a response back
  while the socket's buffer is full, and a generation keeps one copy of its text however slowly it is read.
- A client of HTTP/1.0, which knows no chunks, gets a stream that ends with the connection.
- What one turn of the event loop writes goes out in one piece (`Cork`).
- Who wants to know at once that the client left can be told without a task that waits for it (`watch_disconnect`).
- A peer that vanished without a word (no FIN ever came) is found by TCP keep-alive.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo_server.http.cork import Cork
from octavo_server.http.listener import detect_dead_peer
from octavo_server.http.request_framing import RequestFraming

logger = logging.getLogger(__name__)

#: In the state of a request's scope: the `TimeoutProtocol` that it came by.
CONNECTION = "connection"

#: More than the application's own limit, so that its answer comes first.
BODY_GRACE_S = 5.0
#: A reader that takes less than this in the whole timeout doesn't read.
MIN_PROGRESS_BYTES = 16 * 1024


class TimeoutProtocol(RequestFraming):
    """`request_timeout_s`, `slow_client_timeout_s` and `on_refused_head` are set by `timeout_protocol`, in a subclass."""

    request_timeout_s: float
    slow_client_timeout_s: float

    _sender_timer: asyncio.TimerHandle | None = None  # the client's request
    _reader_timer: asyncio.TimerHandle | None = None  # our response
    _unread_bytes = 0
    _on_disconnect: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Cork(transport, self.loop)))
        detect_dead_peer(transport.get_extra_info("socket"), idle_s=60, interval_s=15)
        self._set_sender_timer(self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._sender_timer is None and self.timeout_keep_alive_task is None:
            self._set_sender_timer(self.timeout_keep_alive)  # uvicorn forgets its timer even for an empty line

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_sender_timer(None)
        self._set_reader_timer(None)
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        super().connection_lost(exc)
        if on_disconnect is not None:
            on_disconnect()

    def watch_disconnect(self, on_disconnect: Callable[[], None] | None) -> None:
        """Called once if the client leaves before this is called anew. Reads on meanwhile, else it wouldn't be seen."""
        self._on_disconnect = on_disconnect
        if on_disconnect is not None:
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._set_sender_timer(self.request_timeout_s)

    def begin_request(self) -> None:
        super().begin_request()
        self.scope["state"][CONNECTION] = self
        self._set_sender_timer(self.request_timeout_s + BODY_GRACE_S)

    def end_request(self) -> None:
        self._set_sender_timer(None)
        super().end_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._set_reader_timer(self.slow_client_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_reader_timer(None)

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

    def _on_slow_sender(self) -> None:
        if self.flow.read_paused:  # it may have sent all: we don't look, as an earlier answer is on its way
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


def timeout_protocol(
    *,
    request_timeout_s: float,
    slow_client_timeout_s: float,
    on_refused_head: Callable[[str], None],
) -> type[TimeoutProtocol]:
    """uvicorn makes protocols itself, of a class: the settings are the class's. `on_refused_head`: told the method of
    a request whose head is too large, which no application sees."""
    settings = {
        "request_timeout_s": request_timeout_s,
        "slow_client_timeout_s": slow_client_timeout_s,
        "on_refused_head": staticmethod(on_refused_head),
    }
    return type("Protocol", (TimeoutProtocol,), settings)


async def _answer_unchunked(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """uvicorn would send chunks where no length is said."""
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
