"""The HTTP server around a `Router`."""

import socket

from octavo_server.http.server import DrainingServer
from octavo_server.router.app import Router


class RouterServer(DrainingServer):
    def __init__(self, router: Router) -> None:
        self._feed = router.feed
        super().__init__(
            router,
            router.settings,
            router.lifecycle,
            on_refused_head=lambda _: router.telemetry.metrics.ended(
                model="", code=431, reason="refused", duration_s=0.0
            ),
            interface="asgi3",
            proxy_headers=False,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close("the router is shutting down")
        await super().shutdown(sockets)
