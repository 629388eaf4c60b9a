"""Reads the body of a request, for the engine's server and for the router, on bare ASGI.

The size is checked while the bytes arrive, so that a body of any length, declared or chunked, takes no more memory than
the limit. `BodyBudget` bounds all bodies of a process together, and the answers that are kept until they are whole:
each request reserves its bytes as they arrive and releases them when it no longer holds them. A request never waits for
the budget, so slow senders can't block each other; one beyond the budget ends with 503, one beyond its tenant's share
with 429, and an answer that would not fit alone with 400.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from octavo_engine.wire.errors import InvalidRequest, Overloaded, Unavailable
from starlette.types import Message, Receive, Scope

from octavo_server.config import BodyLimits
from octavo_server.http.tenant_shares import TenantShares
from octavo_server.openai.errors import MalformedRequest, RequestTimeout, RequestTooLarge

DISCARD_S = 5.0
DISCARD_BYTES = 2**24
RETRY_AFTER_S = 1.0
TENANT_FRACTION = 0.25
UPLOAD_WINDOW_S = 5.0


class ClientDisconnected(MalformedRequest):
    """The client closed the connection before its body was complete."""


class BodyBudget:
    """Belongs to one event loop. `num_bytes`: currently reserved bytes."""

    def __init__(self, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.shares = TenantShares(max_bytes, TENANT_FRACTION, clock)

    def check_answer(self, num_bytes: int, *, param: str | None = None) -> None:
        """Raise InvalidRequest for an answer that exceeds the whole budget."""
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"The answer takes at least {num_bytes} bytes of memory, and the limit is {self.max_bytes}: ask for "
                "fewer tokens or log-probabilities, stream the answer, or start the server with a larger "
                "--max-body-memory.",
                param=param,
            )

    def reserve(self, tenant: str = "", *, is_answer: bool = False) -> "BodyReservation":
        self.shares.record_request(tenant)
        return BodyReservation(self, tenant, is_answer=is_answer)


class BodyReservation:
    """The bytes of one request's body, or of its answer. Leaving the `with` block releases them."""

    __slots__ = ("_budget", "_is_answer", "num_bytes", "tenant")

    def __init__(self, budget: BodyBudget, tenant: str, *, is_answer: bool) -> None:
        self._budget = budget
        self._is_answer = is_answer
        self.tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Reserve more bytes. Raises Unavailable if the budget is used up, Overloaded if the tenant's share is used up,
        and InvalidRequest for an answer that exceeds the whole budget.

        The only body of a tenant is never beyond the share, as its size has a limit of its own.
        """
        budget = self._budget
        if self._is_answer:
            budget.check_answer(self.num_bytes + num_bytes)
        if budget.num_bytes + num_bytes > budget.max_bytes:
            raise Unavailable(
                f"The server is busy: request bodies and answers take {budget.num_bytes} bytes of memory, and "
                f"{num_bytes} more exceed the limit of {budget.max_bytes} (--max-body-memory). {self._remedy}",
                retry_after_s=RETRY_AFTER_S,
            )
        held, limit = budget.shares.held(self.tenant), budget.shares.limit(self.tenant)
        is_only_body = held == self.num_bytes and not self._is_answer
        if limit is not None and not is_only_body and held + num_bytes > limit:
            raise Overloaded(
                f"Request bodies and answers of this API key take {held} bytes of memory, and {num_bytes} more exceed "
                f"its share of {limit} while others use the server (--max-body-memory / 4). {self._remedy}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._change(num_bytes)

    @property
    def _remedy(self) -> str:
        return f"Send the request again later{', or stream the answer' if self._is_answer else ''}."

    def release(self) -> None:
        self._change(-self.num_bytes)

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        self._budget.shares.add(self.tenant, num_bytes)

    def __enter__(self) -> "BodyReservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


async def read_body(scope: Scope, receive: Receive, limits: BodyLimits, reservation: BodyReservation) -> bytes:
    """Read the body. Raises RequestTooLarge, RequestTimeout, ClientDisconnected, or Unavailable (no budget left).

    A body that arrives whole in the first message costs neither a timer nor a copy.
    """
    _check_declared(scope, limits.body_bytes)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        _add(reservation, len(body), limits.body_bytes)
        return body
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limits.request_timeout
    try:
        async with asyncio.timeout_at(end_s) as timer:
            return await _read_rest(message, receive, limits, reservation, UploadTimer(timer, end_s, limits))
    except TimeoutError:
        if loop.time() >= end_s:
            reason = f"was not complete after {limits.request_timeout:g} s (--request-timeout)"
        else:
            reason = (
                f"arrived at less than {limits.min_upload_rate} bytes a second for {UPLOAD_WINDOW_S:g} s "
                "(--min-upload-rate)"
            )
        raise RequestTimeout(f"The request body {reason}.") from None


class UploadTimer:
    """Ends a body that arrives too slowly: it moves the deadline each time that the bytes of a window have arrived."""

    def __init__(self, timer: asyncio.Timeout, end_s: float, limits: BodyLimits) -> None:
        self._timer = timer
        self._end_s = end_s
        self._window_bytes = int(limits.min_upload_rate * UPLOAD_WINDOW_S)
        self._begin_window()

    def record(self, num_bytes: int) -> None:
        self._missing_bytes -= num_bytes
        if self._missing_bytes <= 0:
            self._begin_window()

    def _begin_window(self) -> None:
        self._missing_bytes = self._window_bytes
        if self._window_bytes:
            self._timer.reschedule(min(self._end_s, asyncio.get_running_loop().time() + UPLOAD_WINDOW_S))


async def _read_rest(
    message: Message, receive: Receive, limits: BodyLimits, reservation: BodyReservation, timer: UploadTimer
) -> bytes:
    body = bytearray()
    while message["type"] != "http.disconnect":
        chunk = message.get("body", b"")
        _add(reservation, len(chunk), limits.body_bytes)
        body += chunk
        if not message.get("more_body", False):
            return bytes(body)
        timer.record(len(chunk))
        message = await receive()
    raise ClientDisconnected("The client closed the connection before its request body was complete.")


def _check_declared(scope: Scope, max_bytes: int) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise RequestTooLarge(int(value), limit=max_bytes, is_all=True)


def _add(reservation: BodyReservation, num_bytes: int, max_bytes: int) -> None:
    num_in_all = reservation.num_bytes + num_bytes
    if num_in_all > max_bytes:
        raise RequestTooLarge(num_in_all, limit=max_bytes, is_all=False)
    reservation.add(num_bytes)


async def discard_body(receive: Receive) -> None:
    """Read the rest of the body before a response that ends the connection: closing a connection with unread bytes
    resets it, and the client would lose the response.
    """
    num_bytes, more = 0, True
    try:
        async with asyncio.timeout(DISCARD_S):
            while more and num_bytes < DISCARD_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        return
