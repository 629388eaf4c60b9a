"""The HTTP server around a `Router`."""

import socket

import uvicorn

from octavo_server.http.protocol import patient
from octavo_server.http.server import LAST_WORDS_S, DrainingServer
from octavo_server.router.app import Router


class RouterServer(DrainingServer):
    def __init__(self, router: Router) -> None:
        self._feed = router.feed
        delay_s = router.settings.shutdown_delay_s
        super().__init__(_uvicorn_config(router), router.lifecycle, shutdown_delay_s=delay_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close("the router is shutting down")
        await super().shutdown(sockets)


def _uvicorn_config(router: Router) -> uvicorn.Config:
    settings = router.settings
    return uvicorn.Config(
        router,
        interface="asgi3",
        http=patient(
            request_timeout_s=settings.limits.request_timeout_s, slow_client_timeout_s=settings.slow_client_timeout_s
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=settings.uvicorn_log_level,
        access_log=settings.logs_access,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
