"""Sockets: the listening socket of a server, the limit of file descriptors, and TCP keep-alive probes."""

import resource
import socket

from octavo_engine.wire.errors import StartupError

ALL_ADDRESSES = "0.0.0.0"
MAX_OPEN_FILES = 65536
KEEPALIVE_PROBES = 4


def allow_many_connections() -> None:
    """Raise the limit of open files: shells often set 1024, and each connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str | None, port: int, *, shared: bool = False, flag: str = "--port") -> socket.socket:
    """Bind a socket that doesn't listen yet, so connections are refused. Raises StartupError.

    `shared`: several processes may bind the port. `flag`: the flag that sets the port, for the message.
    """
    sock = socket.socket(socket.AF_INET6 if host and ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host or ALL_ADDRESSES, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise cannot_listen(host, port, error, flag=flag) from error
    return sock


def cannot_listen(host: str | None, port: int, error: Exception, *, flag: str = "--port") -> StartupError:
    return StartupError(f"cannot listen on {host or ALL_ADDRESSES}:{port}: {error}. Choose another port with {flag}.")


def detect_dead_peer(sock: socket.socket, *, idle_s: int, interval_s: int) -> None:
    """Make the kernel break the connection when the peer answers no TCP keep-alive probe: its host has vanished."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
