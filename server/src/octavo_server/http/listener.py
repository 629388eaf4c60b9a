"""Sockets: the one that a server listens on, file descriptors for its clients, and keep-alive probes."""

import resource
import socket

from octavo_engine.wire.errors import StartupError

ALL_ADDRESSES = "0.0.0.0"
MAX_OPEN_FILES = 65536
KEEPALIVE_PROBES = 4


def allow_many_connections() -> None:
    """Each takes a file descriptor, and shells allow 1024 where the system allows many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str | None, port: int, *, shared: bool = False, flag: str = "--port") -> socket.socket:
    """Raises StartupError. It doesn't listen yet, so connections are refused. `shared`: several
    processes may. `flag`: the one that chose the port."""
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
    return StartupError(f"cannot listen on {host or ALL_ADDRESSES}:{port}: {error}. Choose another with {flag}.")


def detect_dead_peer(sock: socket.socket, *, idle_s: int, interval_s: int) -> None:
    """Break the connection when a peer that vanished without a word answers no TCP keep-alive probe."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
