"""Runs the application on a socket that is already bound, and owns the process's signals.

The first SIGTERM or SIGINT starts draining (`lifecycle`): the listener stays open, new requests get a 503, running
ones finish or end with an error event at the timeout; then the listener closes. A second signal ends everything at
once. The death of the engine core is noticed within a tick and ends the server with a non-zero exit code.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from octavo_server.api.context import ApiContext
from octavo_server.api.protocol import patient
from octavo_server.config import ServerConfig

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICKS_PER_LOOK = 10  # uvicorn ticks ten times a second
#: After the last response was written: how long its last bytes may take to leave.
LAST_WORDS_S = 5


class ApiServer(uvicorn.Server):
    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(_uvicorn_config(app, config))
        self._context: ApiContext = app.state.context
        self._shutdown_delay_s = config.shutdown_delay_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.engine_died = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().serve(sockets)
        finally:
            if self._stopping is not None:
                self._stopping.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, it doesn't raise the signal again: being told to stop is no failure."""
        previous = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in previous.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called between any two instructions: the work is left to the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.stop, sig)

    def stop(self, sig: int = signal.SIGINT) -> None:
        """Asked a second time, it ends at once."""
        if self._stopping is not None:
            self.force_exit = self.should_exit = True
            return
        self._context.lifecycle.drain(for_good=True)
        self._stopping = asyncio.create_task(self._exit_when_drained(sig))

    async def on_tick(self, counter: int) -> bool:
        if self._context.client.is_dead:
            self.engine_died = True
            self.should_exit = True
            logger.error("the engine core is gone: the server ends")
        if counter % TICKS_PER_LOOK == 0:
            self._context.look_at_engine()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.lifecycle.end_now()
        self._context.kv.close("the replica is shutting down")
        await super().shutdown(sockets)

    async def _exit_when_drained(self, sig: int) -> None:
        lifecycle = self._context.lifecycle
        delay_s = self._shutdown_delay_s if sig == signal.SIGTERM else 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(max(delay_s, lifecycle.remaining_s or 0.0) + LAST_WORDS_S):
                await lifecycle.drained(at_least_s=delay_s)
        self.should_exit = True


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=patient(
            request_timeout_s=config.limits.request_timeout_s, slow_client_timeout_s=config.slow_client_timeout_s
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=config.logs_access,
        server_header=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
