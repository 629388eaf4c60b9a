"""`Lifecycle`: the states accepting, sleeping, draining and stopping of a server.

While draining, new requests are refused and running ones may finish; those that outlast the timeout are ended with an
error. A draining server can resume, a stopping one (the process got a signal to end) can't. A sleeping server refuses
new requests, too, while its engine has no memory. `DrainMiddleware` refuses and counts requests; it counts from the
first byte, so that a request still being read or tokenised is included.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from octavo_engine.wire.errors import Unavailable
from octavo_engine.wire.sleep import WAKE_RETRY_S
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_server.http.access import kind_of, route_path
from octavo_server.http.body import discard_body
from octavo_server.http.in_flight import InFlight
from octavo_server.json_responses import error_reply

logger = logging.getLogger(__name__)

State = Literal["accepting", "sleeping", "draining", "stopping"]

#: Delay after which a client refused by a draining server should retry: meanwhile another server takes its place.
RETRY_AFTER_S = 5.0


class Lifecycle:
    """Belongs to one event loop. `timeout_s`: time that running requests have from the beginning of a drain.

    `on_change` is called after each change of the state.
    """

    def __init__(self, in_flight: InFlight, *, timeout_s: float) -> None:
        self._drain_state: Literal["draining", "stopping"] | None = None
        self._is_sleeping = False
        self.num_requests = 0
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._ender: asyncio.Handle | None = None
        self._deadline_s = 0.0  # by the loop's clock, once `_ender` is set
        self._accepts_until_s = 0.0  # by the loop's clock, while the state is not accepting
        self._idle = asyncio.Event()
        self._idle.set()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def state(self) -> State:
        """The state; of a drain and sleep at the same time, the drain."""
        return self._drain_state or ("sleeping" if self._is_sleeping else "accepting")

    def fall_asleep(self, *, ends_requests: bool) -> None:
        """Refuse new requests until `wake_up`. `ends_requests`: end running requests with an error."""
        self._is_sleeping = True
        self.on_change()
        if ends_requests:
            text = "The server went to sleep: send the request to another one, or again after POST /wake_up."
            self._in_flight.end_all(Unavailable(text, retry_after_s=WAKE_RETRY_S))

    def wake_up(self) -> None:
        """Accept requests again, unless the server drains."""
        self._is_sleeping = False
        if self._drain_state is None:
            self._in_flight.reopen()
        self.on_change()

    def drain(self, *, for_good: bool = False, accepts_for_s: float = 0.0) -> None:
        """Start draining. A second call doesn't extend the time. `for_good`: the server stops and can't resume.

        `accepts_for_s`: for this time new requests are still served, though the state says that they should go
        elsewhere.
        """
        self._accepts_until_s = asyncio.get_running_loop().time() + accepts_for_s
        if for_good:
            self._enter_state("stopping")
        if self._ender is not None:
            return
        if not for_good:
            self._enter_state("draining")
        logger.info("draining: %d requests have %g s to finish", self.num_requests, self._timeout_s)
        loop = asyncio.get_running_loop()
        self._deadline_s = loop.time() + self._timeout_s
        self._ender = loop.call_later(self._timeout_s, self._end_all)

    def resume(self) -> bool:
        """Accept requests again. Return False if the server is stopping."""
        if self.state == "stopping":
            return False
        if self._ender is not None:
            self._ender.cancel()
            self._ender = None
        if not self._is_sleeping:
            self._in_flight.reopen()
        self._enter_state(None)
        return True

    async def drained(self, *, at_least_s: float = 0.0) -> None:
        """Wait until no request is running, and at least for `at_least_s`; meanwhile new requests still get a 503."""
        await asyncio.sleep(at_least_s)
        await self._idle.wait()

    def end_now(self) -> None:
        if self._ender is not None:
            self._ender.cancel()
        self._end_all()

    @property
    def remaining_s(self) -> float | None:
        """Time left for running requests; None while new requests are accepted."""
        if self._ender is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    async def check_accepting(self, receive: Receive) -> None:
        """Read the body and raise Unavailable while new requests are refused."""
        if self.state == "accepting":
            return
        if self.state != "sleeping" and asyncio.get_running_loop().time() < self._accepts_until_s:
            return
        await discard_body(receive)
        if self.state == "sleeping":
            text = "This server sleeps: send the request to another one, or wake this one with POST /wake_up."
            raise Unavailable(text, retry_after_s=WAKE_RETRY_S)
        raise Unavailable("This server is draining: send the request to another one.", retry_after_s=RETRY_AFTER_S)

    def begin_request(self) -> None:
        self.num_requests += 1
        self._idle.clear()

    def end_request(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self._idle.set()

    def _enter_state(self, state: Literal["draining", "stopping"] | None) -> None:
        self._drain_state = state
        self.on_change()

    def _end_all(self) -> None:
        self._in_flight.end_all(
            Unavailable("The server is shutting down: send the request again.", retry_after_s=RETRY_AFTER_S)
        )


def drain_reply(lifecycle: Lifecycle, *, is_done: bool = True) -> Response:
    """Return the response of `/drain`. `is_done`: False gives status 409, because a stopping server can't resume."""
    remaining_s = None if lifecycle.remaining_s is None else round(lifecycle.remaining_s, 3)
    state = {"state": lifecycle.state, "running": lifecycle.num_requests, "remaining_s": remaining_s}
    return JSONResponse(state, 200 if is_done else 409)


class DrainMiddleware:
    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        closing = self._closing(send)
        if not is_refused_in_drain(scope):
            await self._app(scope, receive, closing)
            return
        try:
            await self._lifecycle.check_accepting(receive)
        except Unavailable as error:
            await error_reply(error, path=scope["path"])(scope, receive, closing)
        else:
            await self._count(scope, receive, closing)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._lifecycle.begin_request()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.end_request()

    def _closing(self, send: Send) -> Send:
        """Make each response during a drain close its connection, so that a proxy opens the next one elsewhere."""

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._lifecycle.state != "accepting":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        return send_closing


def is_refused_in_drain(scope: Scope) -> bool:
    """True for requests of clients; a draining server still serves probes, scrapers and administrators."""
    return kind_of(route_path(scope)) in ("client", None) and scope["method"] != "OPTIONS"
