"""Sockets: the listening socket of a server, the limit of file descriptors, and TCP's acknowledgements."""

import fcntl
import resource
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo_engine.wire.errors import StartupError

ALL_ADDRESSES = "0.0.0.0"
MAX_OPEN_FILES = 65536
KEEPALIVE_PROBES = 4


def allow_many_connections() -> None:
    """Raise the limit of open files: shells often set 1024, and each connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


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


@contextmanager
def bound_unix(path: Path) -> Iterator[socket.socket]:
    """Bind a Unix socket that doesn't listen yet, and delete its file at the end. Raises StartupError.

    A socket on which no server listens is replaced, as a killed server leaves its file behind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            if path.is_socket() and not _has_listener(path):
                path.unlink()
            sock.bind(str(path))
        except OSError as error:
            raise cannot_listen(path, 0, error) from error
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(str(path)) == 0


def cannot_listen(host: Path | str | None, port: int, error: Exception, *, flag: str = "--port") -> StartupError:
    if isinstance(host, Path):
        return StartupError(f"cannot listen on {host}: {error}. Choose another file with --uds.")
    return StartupError(f"cannot listen on {host or ALL_ADDRESSES}:{port}: {error}. Choose another port with {flag}.")


def detect_dead_peer(sock: socket.socket, *, idle_s: int, interval_s: int) -> None:
    """Make the kernel break the connection when the peer answers no TCP keep-alive probe: its host has vanished."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def num_unacknowledged_bytes(sock: socket.socket) -> int:
    """Bytes written to a TCP connection that the peer's host has not acknowledged."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    return int(count)
