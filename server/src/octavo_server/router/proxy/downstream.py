"""`Downstream`: the client's side of one request, on bare ASGI: request body, response, and disconnect.

States: waiting, started (the response head was sent), ended. When the client disconnects or the server ends the
request, the request's task is cancelled wherever it waits; `ended_by` then holds the reason. A failure after the head
ends an event stream with an error event, and any other response by closing the connection.
"""

import asyncio
from typing import TYPE_CHECKING

from octavo_engine.log_format import REQUEST_ID
from octavo_engine.wire.errors import OctavoError
from starlette.types import Receive, Scope, Send

from octavo_server.anthropic.errors import error_body
from octavo_server.config import BodyLimits
from octavo_server.http.body import BodyReservation, ClientDisconnected, read_body
from octavo_server.http.cors import CorsPolicy
from octavo_server.http.request_id import id_headers
from octavo_server.http.timeout_protocol import BEGUN_S, CONNECTION, TimeoutProtocol
from octavo_server.json_responses import error_head
from octavo_server.openai.errors import describe
from octavo_server.router.upstream.headers import Headers

if TYPE_CHECKING:
    from octavo_server.http.lifecycle import Lifecycle
    from octavo_server.router.proxy.sse import Dialect, SSEFramer


class ClientLeft(OctavoError):
    """The client closed the connection."""


class Downstream:
    """`framer`: set while an event stream is relayed. `status`: code of the response, 0 before its head was sent.
    `begun_s`: the event loop's time at which the request's first byte arrived.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, lifecycle: "Lifecycle", *, request_id: str, cors: CorsPolicy
    ) -> None:
        self._cors = cors
        self.scope = scope
        self.headers: Headers = scope["headers"]
        self.begun_s: float = scope["state"][BEGUN_S]
        self.request_id = request_id
        REQUEST_ID.set(self.request_id)
        self.status = 0
        self.is_done = False
        self.framer: SSEFramer | None = None
        self.dialect: Dialect = "chunks"
        self.ended_by: Exception | None = None
        self._lifecycle = lifecycle
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()

    @property
    def has_started(self) -> bool:
        return self.status != 0

    @property
    def target(self) -> bytes:
        query: bytes = self.scope["query_string"]
        path: bytes = self.scope["raw_path"]
        return path + b"?" + query if query else path

    async def read_body(self, limits: BodyLimits, reservation: BodyReservation) -> bytes:
        """Read the body. Raises RequestTooLarge, RequestTimeout, ClientLeft, or Unavailable (no memory budget left)."""
        try:
            return await read_body(self.scope, self._receive, limits, reservation)
        except ClientDisconnected as error:
            raise ClientLeft(str(error)) from None

    def watch_disconnect(self) -> None:
        """Cancel the request at once when the client disconnects.

        The protocol calls back: a task that waits for `receive` would cost as much as all other work of the proxy.
        """
        connection: TimeoutProtocol = self.scope["state"][CONNECTION]
        connection.watch_disconnect(lambda: self.end(ClientLeft("The client left.")))

    def end(self, error: Exception) -> None:
        """Cancel the request's task. The client receives `error` unless it has disconnected."""
        if not self.is_done and self.ended_by is None:
            self.ended_by = error
            assert self._task is not None
            self._task.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        if self._lifecycle.state != "accepting":
            headers.append((b"connection", b"close"))
        headers += self._cors.response_headers(self.headers)
        ids = id_headers(self.scope["path"], self.request_id)
        headers += [(name.encode(), value.encode("latin-1")) for name, value in ids.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        self.is_done = True
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: Exception) -> None:
        """Send the error as a response, or as the last event of a stream. A client that left receives nothing."""
        if isinstance(error, ClientLeft):
            self.is_done = True
        elif not self.has_started:
            described = describe(error)
            body = error_body(described, self.scope["path"])
            await self.start(described.status, error_head(described, body))
            await self.finish(body)
        elif self.framer is not None and not self.is_done:
            await self.finish(b"" if self.framer.has_ended else self.framer.failure(error))
