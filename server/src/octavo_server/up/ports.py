"""Ports for processes that are still to start, kept until they have: bound here, never listened on.

Whoever binds with SO_REUSEADDR, as our servers do, may take a kept port; the system gives it to nobody who asks for any
port. So one that the router has been told stays a replica's through its restarts.
"""

import socket
from contextlib import ExitStack

from octavo_server.http.listener import bind

LOOPBACK = "127.0.0.1"


class ReservedPorts(ExitStack):
    def reserve(self, host: str | None, port: int) -> int:
        """0: a free one. Raises StartupError for one that somebody listens on."""
        kept: socket.socket = self.enter_context(bind(host, port))
        return int(kept.getsockname()[1])
