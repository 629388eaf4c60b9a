"""Responses, streamed or not, that are cancelled when their client disconnects.

The work of a response runs as a task beside another task that waits for the disconnect. A disconnect cancels the work,
and cancelled work aborts the request in the engine. An error before the first byte gets its real status; in a stream
that has begun it is an event, and `[DONE]` follows. This is the request boundary: no error is raised past it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from octavo_engine.wire.errors import Unavailable
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo_server.http.in_flight import InFlight
from octavo_server.json_responses import JSON_TYPE, send_error
from octavo_server.openai import sse
from octavo_server.openai.errors import describe, is_known

if TYPE_CHECKING:
    from octavo_server.request_metrics import RequestUsage

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]


class CancellableResponse(Response):
    """States: waiting, started (the headers were sent), ended."""

    def __init__(self, in_flight: InFlight, request_id: str) -> None:
        super().__init__()
        self._in_flight = in_flight
        self._request_id = request_id
        self._work: asyncio.Task[None] | None = None
        self._ended_by: Exception | None = None
        self._has_started = False
        self._path = ""
        self._usage: RequestUsage | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path, self._usage = scope["path"], scope["state"].get("usage")
        work = self._work = asyncio.create_task(self._run(send))
        self._in_flight.add(self)
        try:
            if await run_until_disconnect(work, receive):
                error = self._error_of(work)
                self._end_usage("error" if error is not None else "")
                await self._finish(send, error)
            else:
                logger.info("request %s: the client left, aborting", self._request_id)
        finally:
            self._in_flight.discard(self)
            self._end_usage("cut")

    def end(self, error: Exception) -> None:
        self._ended_by = error
        if self._work is not None:
            self._work.cancel()

    def _end_usage(self, finish: str) -> None:
        """End the request once, before the last bytes are sent, because the client may then send its next request."""
        if self._usage is not None:
            self._usage.end(finish)

    def _error_of(self, work: "asyncio.Task[None]") -> Exception | None:
        if work.cancelled():
            return self._ended_by
        error = work.exception()
        return error if isinstance(error, Exception) else None

    async def _run(self, send: Send) -> None:
        raise NotImplementedError

    async def _finish(self, send: Send, error: Exception | None) -> None:
        if error is not None:
            log_failure(error, self._request_id)
            if not self._has_started:
                await send_error(send, describe(error), path=self._path)

    async def _start(self, send: Send, status: int, headers: Headers) -> None:
        self._has_started = True
        await send({"type": "http.response.start", "status": status, "headers": headers})


class CancellableJSONResponse(CancellableResponse):
    """`headers` is called after `body`, as the values of headers may depend on the body."""

    kind = JSON_TYPE

    def __init__(
        self,
        in_flight: InFlight,
        request_id: str,
        body: Callable[[], Awaitable[bytes]],
        headers: Callable[[], Headers] = list,
    ) -> None:
        super().__init__(in_flight, request_id)
        self._body = body
        self._make_headers = headers

    async def _run(self, send: Send) -> None:
        body = await self._body()
        self._end_usage("")
        await self._start(send, 200, [self.kind, _length(body), *self._make_headers()])
        await send({"type": "http.response.body", "body": body})


class CancellableTextResponse(CancellableJSONResponse):
    kind = (b"content-type", b"text/plain; charset=utf-8")


class SSEResponse(CancellableResponse):
    """`headers` is called, and the headers are sent, when the first frame is ready."""

    def __init__(
        self,
        in_flight: InFlight,
        request_id: str,
        frames: AsyncGenerator[bytes, None],
        headers: Callable[[], Headers],
    ) -> None:
        super().__init__(in_flight, request_id)
        self._frames = frames
        self._make_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames past the middleware, which only reads response heads: six calls fewer for each token."""
        self._send_body = scope["state"]["send_body"]
        await super().__call__(scope, receive, send)

    async def _run(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                if not self._has_started:
                    await self._start(send, 200, [*sse.HEADERS, *self._make_headers()])
                await self._send_body({"type": "http.response.body", "body": frame, "more_body": True})

    async def _finish(self, send: Send, error: Exception | None) -> None:
        await super()._finish(send, error)
        if self._has_started:
            await send({"type": "http.response.body", "body": self._ending(error)})

    def _ending(self, error: Exception | None) -> bytes:
        return (sse.error_frame(error) if error is not None else b"") + sse.DONE


def log_failure(error: Exception, request_id: str) -> None:
    if describe(error).status < 500:
        return
    if isinstance(error, Unavailable):
        logger.warning("request %s was refused: %s", request_id, error)
    elif is_known(error):
        logger.error("request %s failed: %s", request_id, error)
    else:
        logger.error("request %s failed", request_id, exc_info=error)


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


async def run_until_disconnect(work: "asyncio.Task[None]", receive: Receive) -> bool:
    """Return True when the work has ended, False if the client left first and the work was cancelled.

    The exception of the work is not raised.
    """
    client = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({work, client}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        work.cancel()
        client.cancel()
        await asyncio.gather(work, client, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
