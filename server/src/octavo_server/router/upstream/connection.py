"""One HTTP/1.1 connection to a replica and the responses that arrive on it, one at a time, without pipelining.

llhttp parses the bytes once; headers and bodies stay bytes. Closing an incomplete response closes its connection, so
that the replica aborts the request when the client disconnects.
"""

import asyncio
from collections.abc import Callable

import httptools

from octavo_server.http.listener import detect_dead_peer, num_unacknowledged_bytes
from octavo_server.openai.errors import ReplicaLost
from octavo_server.router.upstream.headers import Headers, value_of

EVENT_STREAM = b"text/event-stream"
#: Reading from the replica pauses while more bytes than this wait for the client.
MAX_WAITING_BYTES = 256 * 1024
#: Most bytes of heads, trailers and chunk framing that may arrive without a byte of the body in between.
MAX_FRAMING_BYTES = 64 * 1024
#: A connection that was idle for longer may be stale: closed by the replica just before the request was written.
STALE_AFTER_IDLE_S = 1.0
#: A connection lost later than this after the request was written wasn't stale: the replica may have read it.
STALE_WITHIN_S = 0.25


class NotReached(ReplicaLost):
    """There was no connection, or it did not deliver the request: the replica has not received all of it."""


class StaleConnection(NotReached):
    """The replica closed an idle connection before it read the request. A new connection may work."""


class UpstreamResponse:
    """A response while it arrives. States: waiting, begun (`status` is set), complete, failed (`error` is set).

    The response fails when no byte arrives for `limit_s` after `active_s` (a time of the loop's clock).
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_waiter",
        "active_s",
        "error",
        "headers",
        "is_complete",
        "limit_s",
        "num_waiting_bytes",
        "status",
    )

    def __init__(self, connection: "Connection", limit_s: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = False
        self.error: Exception | None = None
        self.limit_s = limit_s
        self.active_s = connection.loop.time()
        self.num_waiting_bytes = 0
        self._connection = connection
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    async def wait_headers(self) -> None:
        while not self.status:
            await self._wait_change()

    async def wait_complete(self) -> None:
        """Wait until the body is complete or the buffer is full. Raises the error with which the response failed."""
        while not self.is_complete and not self.is_paused:
            await self._wait_change()

    async def next_chunk(self) -> bytes:
        """Wait for body bytes and return all that have arrived; return none once the body is complete.

        Raises the error with which the response failed.
        """
        while not self._chunks and not self.is_complete:
            await self._wait_change()
        return self.take_chunks()

    @property
    def is_stream(self) -> bool:
        return value_of(self.headers, b"content-type").startswith(EVENT_STREAM)

    @property
    def is_paused(self) -> bool:
        """True while reading from the replica is paused because the client reads too slowly."""
        return self.num_waiting_bytes > MAX_WAITING_BYTES

    def take_chunks(self) -> bytes:
        """Return the buffered bytes, possibly none, and empty the buffer."""
        chunks, self._chunks = self._chunks, []
        if self.is_paused and not self.is_complete:
            self._connection.transport.resume_reading()
        self.num_waiting_bytes = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        if not self.is_complete:
            self._connection.abort()

    def fail(self, error: Exception) -> None:
        if not self.is_complete and self.error is None:
            self.error = error
            self._wake()

    def begin(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def feed(self, data: bytes) -> None:
        self._chunks.append(data)
        was_paused = self.is_paused
        self.num_waiting_bytes += len(data)
        if self.is_paused and not was_paused:
            self._connection.transport.pause_reading()
        self._wake()

    def complete(self) -> None:
        self.is_complete = True
        self._wake()

    async def _wait_change(self) -> None:
        if self.error is not None:
            raise self.error
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """`on_idle` is called when the response is complete and the connection is reusable, `on_lost` when it is closed."""

    transport: asyncio.Transport

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_idle: "Callable[[Connection], None]",
        on_lost: "Callable[[Connection], None]",
    ) -> None:
        self.loop = loop
        self.response: UpstreamResponse | None = None
        self.idle_since_s: float | None = None
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._reset_message()
        self._may_be_stale = False
        self._sent_s = 0.0

    def start(self, request: bytes, limit_s: float) -> UpstreamResponse:
        assert self.response is None, "two requests at once on one connection"
        self._sent_s = self.loop.time()
        self._may_be_stale = self.idle_since_s is not None and self._sent_s - self.idle_since_s > STALE_AFTER_IDLE_S
        self._reset_message()
        response = self.response = UpstreamResponse(self, limit_s)
        self.transport.write(request)
        return response

    def abort(self) -> None:
        self.response = None
        self.transport.abort()

    @property
    def is_usable(self) -> bool:
        return not self.transport.is_closing()

    @property
    def is_delivered(self) -> bool:
        """True if the replica's host has acknowledged all bytes written so far."""
        sock = self.transport.get_extra_info("socket")
        return not self.transport.get_write_buffer_size() and not num_unacknowledged_bytes(sock)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            detect_dead_peer(sock, idle_s=15, interval_s=5)

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:  # the replica sent bytes without a request
            self.transport.abort()
            return
        response.active_s = self.loop.time()
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(response, f"its answer is not valid HTTP: {error}")
            return
        if self._is_complete:
            self._end(response)
        elif self._framing_bytes > MAX_FRAMING_BYTES:
            self._fail(response, f"the headers of its answer are longer than {MAX_FRAMING_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        del self._parser  # it refers to this object, which would wait for the garbage collector
        response, self.response = self.response, None
        if response is not None:
            has_length = any(name in (b"content-length", b"transfer-encoding") for name, _ in response.headers)
            if response.status and not has_length and exc is None:
                response.complete()
            elif self._is_stale:
                response.fail(StaleConnection("it closed an idle connection"))
            else:
                response.fail(ReplicaLost("the connection broke"))
        self._on_lost(self)

    def on_message_begin(self) -> None:
        self._num_messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers are dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response: the final one follows
            self._headers, self._num_messages = [], 0
        elif self.response is not None:
            self._has_head = True
            self.response.begin(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if self.response is not None and not self._is_complete:
            self.response.feed(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete, self._keeps_alive = True, self._parser.should_keep_alive()

    def _reset_message(self) -> None:
        self._headers = []
        self._framing_bytes = 0
        self._has_head = self._is_complete = self._keeps_alive = False
        self._num_messages = 0

    @property
    def _is_stale(self) -> bool:
        return self._may_be_stale and not self._framing_bytes and self.loop.time() - self._sent_s < STALE_WITHIN_S

    def _end(self, response: UpstreamResponse) -> None:
        """Complete the response. Surplus bytes would become part of the next response, so they close the connection."""
        self.response = None
        if response.is_paused:
            self.transport.resume_reading()
        response.complete()
        has_surplus = self._num_messages > 1
        if has_surplus or not self._keeps_alive or self.transport.get_write_buffer_size():
            self.transport.close()
        else:
            self._on_idle(self)

    def _fail(self, response: UpstreamResponse, reason: str) -> None:
        response.fail(ReplicaLost(reason))
        self.abort()
