"""The engine's server: it ends, with a non-zero exit code, when the engine core is gone."""

import logging
import socket

import uvicorn
from fastapi import FastAPI

from octavo_server.api.context import ApiContext
from octavo_server.config import ServerConfig
from octavo_server.http.protocol import patient
from octavo_server.http.server import LAST_WORDS_S, TICKS_PER_S, DrainingServer

logger = logging.getLogger(__name__)


class ApiServer(DrainingServer):
    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self._context: ApiContext = app.state.context
        lifecycle = self._context.lifecycle
        super().__init__(_uvicorn_config(app, config), lifecycle, shutdown_delay_s=config.shutdown_delay_s)
        self.engine_died = False

    async def on_tick(self, counter: int) -> bool:
        """The death of the engine core is noticed within a tick."""
        if self._context.client.is_dead:
            self.engine_died = True
            self.should_exit = True
            logger.error("the engine core is gone: the server ends")
        if counter % TICKS_PER_S == 0:
            self._context.look_at_engine()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.kv.close("the replica is shutting down")
        await super().shutdown(sockets)


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
