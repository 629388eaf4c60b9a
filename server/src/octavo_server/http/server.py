"""`DrainingServer` runs an application on a bound socket and handles the process's signals.

The first SIGTERM or SIGINT starts a drain (`http/lifecycle.py`): the listener stays open, new requests get a 503,
running ones finish or end with an error event at the timeout; then the listener closes. A second signal ends everything
at once. A subclass may override `on_tick` and `shutdown` for its own resources, and may serve new requests during the
shutdown delay.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo_server.config import HttpSettings
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.listener import listen
from octavo_server.http.timeout_protocol import TimeoutProtocol, timeout_protocol

SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Time for sending the last bytes of the last response.
FINAL_WRITE_S = 5


class DrainingServer(uvicorn.Server):
    accepts_during_delay = False

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        lifecycle: Lifecycle,
        *,
        on_refused_head: Callable[[str], None],
        **more: Any,
    ) -> None:
        """`on_refused_head`: see `timeout_protocol`. `more`: further settings of `uvicorn.Config`."""
        http = timeout_protocol(settings, on_refused_head)
        super().__init__(_uvicorn_config(app, settings, http, more))
        self._lifecycle = lifecycle
        self._shutdown_delay_s = settings.shutdown_delay
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().serve(sockets)
        finally:
            if self._stopping is not None:
                self._stopping.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Raises StartupError for a socket on which it cannot listen."""
        for sock in sockets or ():
            listen(sock)
        await super().startup(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers. Unlike uvicorn's method, don't raise the signal again: a stop is no failure."""
        previous = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in previous.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Schedule `stop` on the event loop, as a signal handler may run between any two instructions."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.stop, sig)

    def stop(self, sig: int = signal.SIGINT) -> None:
        """Drain, then stop. A second call stops at once."""
        if self._stopping is not None:
            self.force_exit = self.should_exit = True
            return
        delay_s = self._shutdown_delay_s if sig == signal.SIGTERM else 0.0
        self._lifecycle.drain(for_good=True, accepts_for_s=delay_s if self.accepts_during_delay else 0.0)
        self._stopping = asyncio.create_task(self._exit_when_drained(delay_s))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._lifecycle.end_now()
        await super().shutdown(sockets)

    async def _exit_when_drained(self, delay_s: float) -> None:
        lifecycle = self._lifecycle
        with suppress(TimeoutError):
            async with asyncio.timeout(max(delay_s, lifecycle.remaining_s or 0.0) + FINAL_WRITE_S):
                await lifecycle.drained(at_least_s=delay_s)
        self.should_exit = True


class ProbeServer(DrainingServer):
    """Answers probes of a process without requests. `on_stop` is called at each signal; `end` makes `serve` return."""

    def __init__(self, settings: HttpSettings, *, is_ready: Callable[[], bool], on_stop: Callable[[], None]) -> None:
        async def health(request: Request) -> Response:
            return Response()

        async def ready(request: Request) -> Response:
            return JSONResponse({"ready": is_ready()}, 200 if is_ready() else 503)

        app = Starlette(routes=[Route("/health", health), Route("/ready", ready)])
        super().__init__(app, settings, Lifecycle(InFlight(), timeout_s=0.0), on_refused_head=lambda reason: None)
        self._on_stop = on_stop

    def stop(self, sig: int = signal.SIGINT) -> None:
        self._on_stop()

    def end(self) -> None:
        self.should_exit = True


def _uvicorn_config(
    app: ASGIApp, settings: HttpSettings, http: type[TimeoutProtocol], more: dict[str, Any]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        server_header=False,
        proxy_headers=False,  # a client may write any text into X-Forwarded-For, and so into the access log
        timeout_keep_alive=settings.keep_alive_timeout,
        timeout_graceful_shutdown=FINAL_WRITE_S,
        reset_contextvars=True,  # else a pipelined request begins with the tenant and the replica of the one before
        **more,
    )
