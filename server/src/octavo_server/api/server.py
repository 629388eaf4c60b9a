"""`ApiServer`: the HTTP server of one engine; it stops with a non-zero exit code when the engine core has died."""

import asyncio
import logging
import socket
from typing import Any

from fastapi import FastAPI

from octavo_server.api.context import ApiContext
from octavo_server.config import ServerConfig, TlsSettings
from octavo_server.http.server import DrainingServer
from octavo_server.supervise import cancel_tasks, supervised

logger = logging.getLogger(__name__)

HEALTH_EVERY_S = 1.0


def _tls_options(tls: TlsSettings) -> dict[str, Any]:
    """Settings of `uvicorn.Config`."""
    if tls.ssl_certfile is None:
        return {}
    ciphers = {} if tls.ssl_ciphers is None else {"ssl_ciphers": tls.ssl_ciphers}
    return {
        "ssl_certfile": tls.ssl_certfile,
        "ssl_keyfile": tls.ssl_keyfile,
        "ssl_ca_certs": None if tls.ssl_ca_certs is None else str(tls.ssl_ca_certs),
        "ssl_cert_reqs": tls.ssl_cert_reqs,
        **ciphers,
    }


class ApiServer(DrainingServer):
    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self._context: ApiContext = app.state.context
        http = self._context.telemetry.http
        super().__init__(
            app, config, self._context.lifecycle, on_refused_head=http.record_refused_head, **_tls_options(config.tls)
        )
        self.engine_died = False
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tasks.append(supervised("updating the health", self._update_health))

    async def on_tick(self, counter: int) -> bool:
        """Stop the server if the engine core has died. An exception here would end the server."""
        if self._context.client.is_dead:
            self.engine_died = True
            self.should_exit = True
            logger.error("the process of the engine core has ended; stopping the server")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.kv.close("the replica is shutting down")
        await super().shutdown(sockets)
        await cancel_tasks(self._tasks)

    async def _update_health(self) -> None:
        while True:
            self._context.update_health()
            await asyncio.sleep(HEALTH_EVERY_S)
