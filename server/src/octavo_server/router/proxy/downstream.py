"""`Downstream`: the client's side of one request, on bare ASGI: its body, its answer, and whether it is still there.

States: waiting, started (the head is out), ended. One that leaves, and one that the server has to end, has its task
cancelled, wherever that waits; `ended_by` then says why.
"""

import asyncio
import random
from typing import TYPE_CHECKING

from octavo_engine.log_format import REQUEST_ID
from octavo_engine.wire.errors import OctavoError
from starlette.types import Receive, Scope, Send

from octavo_server.config import RequestLimits
from octavo_server.http.body import BodyReservation, ClientDisconnected, read_body
from octavo_server.http.protocol import CONNECTION, TimeoutProtocol
from octavo_server.http.request_id import usable_id
from octavo_server.http.responses import JSON_TYPE
from octavo_server.openai.errors import describe
from octavo_server.router.proxy.sse import Dialect, SSEFramer
from octavo_server.router.upstream.headers import Headers, value_of

if TYPE_CHECKING:
    from octavo_server.http.lifecycle import Lifecycle
    from octavo_server.router.observe.request_observer import RequestObserver


#: A page in a browser may read what went wrong, too; answers of replicas say so themselves.
ANY_ORIGIN = (b"access-control-allow-origin", b"*")


class ClientLeft(OctavoError):
    """Nobody is there to be told anything."""


def request_id_of(headers: Headers) -> str:
    given = value_of(headers, b"x-request-id")
    return (usable_id(given.decode("latin-1")) if given else "") or f"{random.getrandbits(128):032x}"


class Downstream:
    __slots__ = (
        *("_lifecycle", "_receive", "_send", "_task", "dialect", "ended_by", "gate"),
        *("has_started", "is_done", "request_id", "scope", "status", "track"),
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, lifecycle: "Lifecycle", *, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        REQUEST_ID.set(self.request_id)
        self.has_started = False
        self.is_done = False
        self.status = 0  # of the answer, once it has started
        self.gate: SSEFramer | None = None  # of an event stream
        self.dialect: Dialect = "chunks"
        self.track: RequestObserver | None = None
        self.ended_by: Exception | None = None
        self._lifecycle = lifecycle
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()

    async def body(self, limits: RequestLimits, reservation: BodyReservation) -> bytes:
        """Raises RequestTooLarge, RequestTimeout, Unavailable, ClientLeft."""
        try:
            return await read_body(self.scope, self._receive, limits, reservation)
        except ClientDisconnected as error:
            raise ClientLeft(str(error)) from None

    def watch(self) -> None:
        """From now on a client that leaves ends the request at once.

        Told by the connection: a task that waits for `receive` would cost as much as all else here.
        """
        connection: TimeoutProtocol = self.scope["state"][CONNECTION]
        connection.watch(self._leave)

    def _leave(self) -> None:
        self.end(ClientLeft("The client left."))

    def end(self, error: Exception) -> None:
        """Tell the client this, and end."""
        if not self.is_done and self.ended_by is None:
            self.ended_by = error
            assert self._task is not None
            self._task.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        self.status = status
        if self._lifecycle.state != "accepting":
            headers.append((b"connection", b"close"))
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def fail(self, error: Exception) -> None:
        """The one answer to what went wrong. A connection that is cut says it where nothing else can."""
        if isinstance(error, ClientLeft):
            self.is_done = True
        elif not self.has_started:
            described = describe(error)
            body = described.body()
            extra = [ANY_ORIGIN] if value_of(self.scope["headers"], b"origin") else []
            extra += [(name.lower().encode(), value.encode("latin-1")) for name, value in described.headers.items()]
            await self.start(described.status, [JSON_TYPE, (b"content-length", b"%d" % len(body)), *extra])
            await self.finish(body)
        elif self.gate is not None and not self.is_done:
            await self.finish(b"" if self.gate.has_ended else self.gate.failure(error, self.dialect))

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        self.is_done = True
        await self._send({"type": "http.response.body", "body": data})
