"""Sockets: a server's listening socket, reserved ports, the limit of file descriptors, and TCP's acknowledgements."""

import fcntl
import logging
import resource
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)

ALL_ADDRESSES, LOOPBACK = "0.0.0.0", "127.0.0.1"
MAX_OPEN_FILES = 65536
#: Fewest open files with which a process can start, and the number that is kept free of clients' connections.
MIN_OPEN_FILES, RESERVED_FILES = 64, 128
MIN_CONNECTIONS = 16
KEEPALIVE_PROBES = 4


def allow_connections(asked: int, *, files_each: int = 1) -> int:
    """Raise the limit of open files, as shells often set 1024; return how many of the connections it then allows.

    `files_each`: file descriptors that a connection takes. Raises StartupError if the limit is too low to start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return asked
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    limit = max(soft, limit)
    if limit < MIN_OPEN_FILES:
        raise StartupError(f"the limit of open files is {limit}, less than {MIN_OPEN_FILES}: run ulimit -n 1024.")
    allowed = max((limit - RESERVED_FILES) // files_each, MIN_CONNECTIONS)
    if allowed < asked:
        logger.warning(
            "--max-connections %d is lowered to %d, as the limit of open files is %d: raise the limit (ulimit -n), or "
            "lower the flag",
            *(asked, allowed, limit),
        )
    return min(asked, allowed)


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


def listen(sock: socket.socket) -> None:
    """Start to accept connections. Raises StartupError, for example if another process listens on the port."""
    try:
        sock.listen()
    except OSError as error:
        name = sock.getsockname()
        host, port = (Path(name), 0) if sock.family == socket.AF_UNIX else name[:2]
        raise cannot_listen(host, port, error) from error


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


class ReservedPorts(ExitStack):
    """Reserves ports for processes that start later, by sockets that are bound but never listen.

    A process that binds with SO_REUSEADDR, as our servers do, can use a reserved port; the kernel never assigns it to a
    process that asks for any free port. So a replica keeps its port, under which the router finds it, through all
    restarts.
    """

    def reserve(self, host: str | None, port: int) -> int:
        """Reserve a port (0: any free port) and return its number. Raises StartupError if a process listens on it."""
        kept: socket.socket = self.enter_context(bind(host, port))
        return int(kept.getsockname()[1])
