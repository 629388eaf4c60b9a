"""Runs the application on a socket that is already bound, and owns the process's signals.

The first SIGTERM or SIGINT closes the listener and lets running answers finish for up to the drain timeout; what is
still open then ends with an error event. A second signal ends everything at once. The death of the engine core is
noticed within a tick and ends the server with a non-zero exit code.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from octavo_engine.wire.errors import EngineDead

from octavo_server.api.context import ApiContext
from octavo_server.config import ServerConfig

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICKS_PER_LOOK = 10  # uvicorn ticks ten times a second
#: After the streams were told to end: how long their last bytes may take to leave.
LAST_WORDS_S = 3


class ApiServer(uvicorn.Server):
    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(_uvicorn_config(app, config))
        self._context: ApiContext = app.state.context
        self._drain_timeout_s = config.drain_timeout_s
        self.engine_died = False

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
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._context.client.is_dead:
            self.engine_died = True
            self.should_exit = True
            logger.error("the engine core is gone: the server ends")
        if counter % TICKS_PER_LOOK == 0:
            self._context.look_at_engine()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ender = asyncio.create_task(self._end_streams())
        try:
            await super().shutdown(sockets)
        finally:
            ender.cancel()

    async def _end_streams(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout_s
        if running := len(self._context.in_flight):
            logger.info("%d requests are running: they have %g s to finish", running, self._drain_timeout_s)
        while loop.time() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        self._context.in_flight.end_all(EngineDead("The server is shutting down: send the request again."))


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=config.logs_access,
        server_header=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=int(config.drain_timeout_s) + LAST_WORDS_S,
    )
