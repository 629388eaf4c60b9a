"""One HTTP/1.1 connection to a replica, and what comes over it: an exchange at a time, no pipelining.

Bytes are parsed once, by the parser that uvicorn uses too; headers and bodies stay what they are. An exchange that is
given up takes its connection with it: that is how a replica learns that nobody waits any more.
"""

import asyncio
from collections.abc import Callable

import httptools

from octavo_server.openai.errors import ReplicaLost
from octavo_server.router.upstream.headers import Headers, value_of

EVENT_STREAM = b"text/event-stream"
#: A replica is read no further while so much waits for its client.
MAX_WAITING_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024


class NotReached(ReplicaLost):
    """The replica has nothing of the request: there was no connection."""


class StaleConnection(NotReached):
    """It had been idle, and the replica closed it before it read the request: a new one may do."""


class UpstreamResponse:
    """An answer as it comes in. States: waiting, begun (`status` is set), complete, failed (`error`).

    `limit_s`: the longest silence, counted from `heard_s` by the loop's clock, before it fails.
    `on_change`: told of all that happens, where nobody waits for it.
    """

    __slots__ = (
        *("_chunks", "_connection", "_waiter", "num_waiting"),
        *("error", "headers", "heard_s", "is_complete", "limit_s", "on_change", "status"),
    )

    def __init__(self, connection: "Connection", limit_s: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = False
        self.error: Exception | None = None
        self.limit_s = limit_s
        self.heard_s = connection.loop.time()
        self.num_waiting = 0  # bytes
        self._connection = connection
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.on_change: Callable[[], None] | None = None

    async def begun(self) -> None:
        """Until the head is there. Raises what ended it before."""
        while not self.status:
            await self._change()

    async def gathered(self) -> None:
        """Until it is complete, or too long to be held. Raises what ended it before."""
        while not self.is_complete and not self.is_held_up:
            await self._change()

    async def news(self) -> None:
        """Until `take` has something to give, or it is complete. Raises what ended it, all else being taken."""
        while not self._chunks and not self.is_complete:
            await self._change()

    @property
    def is_stream(self) -> bool:
        return value_of(self.headers, b"content-type").startswith(EVENT_STREAM)

    @property
    def is_held_up(self) -> bool:
        """The client is behind, so the replica isn't read."""
        return self.num_waiting > MAX_WAITING_BYTES

    def take(self) -> bytes:
        """Everything there is, which may be nothing."""
        chunks, self._chunks = self._chunks, []
        if self.is_held_up and not self.is_complete:
            self._connection.transport.resume_reading()
        self.num_waiting = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        """Nobody wants the rest, if there is one."""
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
        was_held_up = self.is_held_up
        self.num_waiting += len(data)
        if self.is_held_up and not was_held_up:
            self._connection.transport.pause_reading()
        self._wake()

    def complete(self) -> None:
        self.is_complete = True
        self._wake()

    async def _change(self) -> None:
        """Raises what ended it."""
        if self.error is not None:
            raise self.error
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self.on_change is not None:
            self.on_change()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """`on_idle`: an exchange is complete, and the connection can have another. `on_lost`: it is gone."""

    transport: asyncio.Transport

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_idle: "Callable[[Connection], None]",
        on_lost: "Callable[[Connection], None]",
    ) -> None:
        self.loop = loop
        self.exchange: UpstreamResponse | None = None
        self.idle_since_s = 0.0
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._head_bytes = 0
        self._num_exchanges = 0
        self._has_end = True  # the answer says itself where it ends

    def start(self, request: bytes, limit_s: float) -> UpstreamResponse:
        assert self.exchange is None, "two exchanges at once"
        self._num_exchanges += 1
        self._headers, self._head_bytes = [], 0
        exchange = self.exchange = UpstreamResponse(self, limit_s)
        self.transport.write(request)
        return exchange

    def abort(self) -> None:
        self.exchange = None
        self.transport.abort()

    @property
    def is_usable(self) -> bool:
        return not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # it says something that nobody asked
            self.transport.abort()
            return
        exchange.heard_s = self.loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail(ReplicaLost(f"its answer is no HTTP: {error}"))
            self.abort()
            return
        if not exchange.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                exchange.fail(ReplicaLost(f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes"))
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            if exchange.status and not self._has_end and exc is None:
                exchange.complete()
            elif self._num_exchanges > 1 and not self._head_bytes and not exchange.status:
                exchange.fail(StaleConnection("it closed an idle connection"))
            else:
                exchange.fail(ReplicaLost("the connection broke"))
        self._on_lost(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
        elif self.exchange is not None:
            self._has_end = any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)
            self.exchange.begin(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self.exchange is not None:
            self.exchange.feed(body)

    def on_message_complete(self) -> None:
        exchange = self.exchange
        if exchange is None or not exchange.status:
            return
        self.exchange = None
        if exchange.is_held_up:
            self.transport.resume_reading()
        exchange.complete()
        if self._parser.should_keep_alive() and not self.transport.get_write_buffer_size():
            self._on_idle(self)
        else:
            self.transport.close()
