"""`ControlConnection`: carries messages between the first host of a model and other hosts, over ZeroMQ with CURVE.

All hosts derive the CURVE keys from the secret of the group, so that messages are encrypted and only hosts with this
secret can connect. The end of a connection is noticed at once; a silent host by heartbeats, after `LOST_S`.
"""

import errno
import hmac
import logging
import os
import queue
import threading
from contextlib import suppress
from typing import Any, Protocol

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from octavo_engine.process.ipc_sockets import Waker
from octavo_engine.wire.errors import StartupError

#: Seconds without a sign of life after which a host is lost.
LOST_S = 5
_HEARTBEAT_MS = 1000
_HANDSHAKE_MS = 10_000
_RECONNECT_MS, _MOST_RECONNECT_MS = 100, 1000
_LINGER_MS = 2000
#: Size limit of a message to the first host, which keeps even an unknown process's messages until its handshake fails.
_MOST_BYTES = 1 << 20
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
#: Failed handshakes in a row that are reported: a single failure may come from a host that ended during its handshake.
MOST_FAILURES = 3
_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
)

_LOGGER = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]


class Receiver(Protocol):
    """Gets the events of a connection, on the connection's thread. `peer`: on the first host, the host that caused the
    event; empty on other hosts."""

    def connected(self) -> None:
        """Note that the first host has accepted the connection. Only other hosts get this call."""

    def received(self, peer: bytes, message: bytes) -> None: ...

    def lost(self, peer: bytes) -> None:
        """Note that a host which had sent messages has ended or is silent. `peer` is empty if the connection itself has
        failed."""

    def refused(self) -> None:
        """Note `MOST_FAILURES` failed handshakes in a row; on the first host, note a single failed handshake of another
        process."""


def describe_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ControlConnection:
    """A socket with a thread, which calls `receiver`. Any thread may send. Call `start` first and `close` last."""

    def __init__(self, secret: bytes, host: str, port: int, receiver: Receiver, *, listens: bool) -> None:
        """Listen on this host's address, or connect to the first host's address. Raises StartupError."""
        self._receiver, self._listens = receiver, listens
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.linger = _LINGER_MS
        self._socket = self._context.socket(zmq.ROUTER if listens else zmq.DEALER)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        self._client_key = z85.decode(zmq.curve_public(_private_key(secret, "other host")))
        self._set_options(secret)
        self._socket.ipv6 = not listens or ":" in host
        self._monitor = self._socket.get_monitor_socket()
        self._outgoing: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._waker = Waker()
        self._lock, self._is_open = threading.Lock(), True
        self._peers: dict[int, bytes] = {}  # by the descriptor of their connection
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="control-connection", daemon=True)
        address = describe_address(host, port)
        try:
            (self._socket.bind if listens else self._socket.connect)(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(_describe_failure(address, error)) from error

    def start(self) -> None:
        """Begin to call the receiver, which must already have this connection."""
        self._thread.start()

    def send(self, message: bytes, peer: bytes = b"") -> None:
        """Send a message; it is lost if the host is gone, and after `close`."""
        self._queue((peer, message))

    def close(self) -> None:
        """Deliver sent messages, for at most two seconds, and close. Further calls do nothing."""
        if self._queue(None):
            self._thread.join()
            self._waker.close()

    def _queue(self, item: tuple[bytes, bytes] | None) -> bool:
        """Queue a message, or None as the last item; return False after the last one."""
        with self._lock:
            was_open = self._is_open
            if was_open:
                self._is_open = item is not None
                self._outgoing.put(item)
                self._waker.wake()
        return was_open

    def _set_options(self, secret: bytes) -> None:
        own, first = self._socket, _private_key(secret, "first host")
        own.set_hwm(0)
        own.heartbeat_ivl, own.heartbeat_timeout, own.heartbeat_ttl = _HEARTBEAT_MS, 1000 * LOST_S, 1000 * LOST_S
        own.handshake_ivl = _HANDSHAKE_MS
        own.reconnect_ivl, own.reconnect_ivl_max = _RECONNECT_MS, _MOST_RECONNECT_MS
        if self._listens:
            own.maxmsgsize = _MOST_BYTES
            own.curve_server, own.zap_domain = True, b"octavo"
            own.curve_secretkey, own.curve_publickey = first, zmq.curve_public(first)
        else:
            key = _private_key(secret, "other host")
            own.curve_serverkey = zmq.curve_public(first)
            own.curve_secretkey, own.curve_publickey = key, zmq.curve_public(key)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _LOGGER.exception("the connection to other hosts has failed")
            for peer in {b"", *self._peers.values()}:
                self._receiver.lost(peer)
        finally:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._context.destroy(linger=_LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._waker.fd, self._socket, self._monitor, self._zap):
            poller.register(each, zmq.POLLIN)
        poller.poll()
        while self._send_all():
            self._take_all()
            poller.poll()

    def _take_all(self) -> None:
        """Receive all messages and events that have arrived. The messages of a connection are handled before its end,
        and a new peer's key is accepted (which lets its messages arrive) only after the end of an earlier connection
        that had the same descriptor.
        """
        requests, events = _receive_all(self._zap), _receive_all(self._monitor)
        while self._socket.poll(0):
            self._receive()
        for event in map(parse_monitor_message, events):
            self._take_event(event["event"], event["value"])
        for request in requests:
            self._answer_zap(request)

    def _send_all(self) -> bool:
        """Send what is queued; return False after `close`."""
        self._waker.clear()
        with suppress(queue.Empty):
            while True:
                item = self._outgoing.get_nowait()
                if item is None:
                    return False
                self._socket.send_multipart(item if self._listens else item[1:])
        return True

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        peer = frames[0].bytes if self._listens else b""
        self._peers[int(frames[-1].get(zmq.SRCFD))] = peer
        self._receiver.received(peer, frames[-1].bytes)

    def _take_event(self, event: int, value: int) -> None:
        if event in _HANDSHAKE_FAILURES:
            self._num_failures += 1
            if self._listens or self._num_failures == MOST_FAILURES:
                self._receiver.refused()
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED and not self._listens:
            self._num_failures = 0
            self._receiver.connected()
        elif event == zmq.Event.DISCONNECTED and (peer := self._peers.pop(value, None)) is not None:
            self._receiver.lost(peer)

    def _answer_zap(self, request: list[bytes]) -> None:
        """Answer ZeroMQ's question about a connection: only one key is known."""
        version, request_id, mechanism, key = request[0], request[1], request[5], request[6]
        is_known = mechanism == b"CURVE" and hmac.compare_digest(key, self._client_key)
        self._zap.send_multipart([version, request_id, b"200" if is_known else b"400", b"", b"", b""])


def _receive_all(socket: Socket) -> list[list[bytes]]:
    received = []
    while socket.poll(0):
        received.append(socket.recv_multipart())
    return received


def _private_key(secret: bytes, role: str) -> bytes:
    return z85.encode(hmac.digest(secret, role.encode(), "sha256"))


def _describe_failure(address: str, error: zmq.ZMQError) -> str:
    remedies: dict[Any, str] = {
        errno.EADDRINUSE: "the port is in use: choose another --master-port on all hosts.",
        errno.EADDRNOTAVAIL: "--master-addr must be an address of the first host, which --node-rank 0 starts.",
        errno.ENODEV: "--master-addr must be an address of the first host, which --node-rank 0 starts.",
    }
    remedy = remedies.get(error.errno, "--master-addr must be an address or a name, and --master-port a free port.")
    return f"{address} cannot be used ({os.strerror(error.errno or 0)}): {remedy}"
