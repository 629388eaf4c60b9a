"""Reserves ports for processes that start later, by sockets that are bound but never listen.

A process that binds with SO_REUSEADDR, as our servers do, can use a reserved port; the kernel never assigns it to a
process that asks for any free port. So a replica keeps its port, under which the router finds it, through all restarts.
"""

import socket
from contextlib import ExitStack

from octavo_server.http.listener import bind

LOOPBACK = "127.0.0.1"


class ReservedPorts(ExitStack):
    def reserve(self, host: str | None, port: int) -> int:
        """Reserve a port (0: any free port) and return its number. Raises StartupError if a process listens on it."""
        kept: socket.socket = self.enter_context(bind(host, port))
        return int(kept.getsockname()[1])
