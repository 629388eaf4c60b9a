"""Faults of the connection between hosts: reused descriptors, hosts that come back or are late, names, lost reasons."""

import logging
import queue
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from octavo_engine.process import headless, rank_processes, remote_hosts
from octavo_engine.process import rank_messages as messages
from octavo_engine.process.control_connection import ControlConnection
from octavo_engine.process.headless import HeadlessHost
from octavo_engine.process.messages import Failed
from octavo_engine.process.rank_processes import RankProcesses
from octavo_engine.process.remote_hosts import SECRET_VARIABLE, RemoteHosts, common_settings, own_address
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError
from octavo_testing.serve_command import free_port

CONFIG = EngineConfig(model="model", tensor_parallel_size=2, nnodes=2)
HELLO = messages.HostHello(1, "10.0.0.2", common_settings(CONFIG))
TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the hosts in these tests")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class SilentConnection:
    """In the place of a `ControlConnection`: holds what is sent."""

    def __init__(self, *args: object, **options: object) -> None:
        self.sent: list[tuple[bytes, messages.ToHost]] = []

    def send(self, message: bytes, peer: bytes = b"") -> None:
        self.sent.append((peer, messages.decode_to_host(message)))

    def start(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def silent_hosts(monkeypatch: pytest.MonkeyPatch) -> RemoteHosts:
    monkeypatch.setattr(remote_hosts, "ControlConnection", SilentConnection)
    return RemoteHosts(CONFIG)


@dataclass
class Frame:
    bytes: bytes
    fd: int = 0

    def get(self, option: int) -> int:
        return self.fd


@dataclass
class Queue:
    """In the place of a socket, with what is received from it. `on_send`: is called by each message that is sent."""

    received: list[Any]
    on_send: Callable[[], None] = lambda: None

    def poll(self, timeout: int) -> int:
        return len(self.received)

    def recv_multipart(self, copy: bool = True) -> Any:
        return self.received.pop(0)

    def send_multipart(self, frames: object) -> None:
        self.on_send()


@dataclass
class Calls:
    made: list[tuple[Any, ...]] = field(default_factory=list)

    def received(self, *args: bytes) -> None:
        self.made.append(("received", *args))

    def lost(self, peer: bytes) -> None:
        self.made.append(("lost", peer))

    def connected(self) -> None: ...

    def refused(self) -> None: ...


@pytest.mark.parametrize("known", [b"old", None], ids=["host", "stranger"])
def test_a_descriptor_that_is_reused_before_its_end_is_read_is_that_of_the_new_host(known: bytes | None) -> None:
    """The new host's message comes as soon as its key is accepted."""
    messages_of_new = [[Frame(b"new"), Frame(b"hello", 10)]]
    connection, calls, data = object.__new__(ControlConnection), Calls(), Queue([])
    ended = [struct.pack("=hi", zmq.Event.DISCONNECTED, 10), b""]
    key = b"k" * 32
    request = [b"1.0", b"1", b"", b"", b"", b"CURVE", key]
    zap = Queue([request], on_send=lambda: data.received.extend(messages_of_new))
    given = {"_receiver": calls, "_listens": True, "_socket": data, "_zap": zap, "_monitor": Queue([ended])}
    given |= {"_client_key": key, "_peers": {} if known is None else {10: known}, "_num_failures": 0}
    vars(connection).update(given)
    for _ in range(2):
        connection._take_all()
    lost = [] if known is None else [("lost", known)]
    assert calls.made == [*lost, ("received", b"new", b"hello")]
    assert connection._peers == {10: b"new"}


def test_a_host_that_comes_back_takes_its_place_again(silent_hosts: RemoteHosts) -> None:
    """Its old connection has ended without a word, which is known after 5 s only."""
    for peer in (b"old", b"new"):
        silent_hosts.received(peer, messages.encode(HELLO))
    ((peer, answer),) = silent_hosts._connection.sent  # type: ignore[attr-defined]
    assert (peer, type(answer)) == (b"old", messages.HostRefused)
    assert "--node-rank 1 is taken by a later process of host 1 (10.0.0.2)" in answer.reason
    silent_hosts.lost(b"old")
    silent_hosts.wait()
    silent_hosts.start_rank(1, lambda rank, report: None)
    assert silent_hosts._connection.sent[-1] == (b"new", messages.StartRank(1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_started", [False, True])
def test_another_host_takes_no_place(has_started: bool, silent_hosts: RemoteHosts) -> None:
    """A place is taken by another address, and once all hosts have joined, by any."""
    silent_hosts.received(b"old", messages.encode(HELLO))
    address = "10.0.0.3"
    if has_started:
        silent_hosts.wait()
        address = HELLO.address
    silent_hosts.received(b"new", messages.encode(messages.HostHello(1, address, HELLO.settings)))
    ((peer, answer),) = silent_hosts._connection.sent  # type: ignore[attr-defined]
    assert peer == b"new"
    assert answer.reason.startswith("--node-rank 1 is taken by host 1 (10.0.0.2)")


@pytest.mark.parametrize("order", [(4, 6), (6, 4)])
def test_a_name_with_addresses_of_both_kinds_is_the_same_address_on_all_hosts(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ resolves the name on the other hosts, and takes its first IPv6 address; this system may prefer IPv4."""
    found = {
        4: (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 1)),
        6: (socket.AF_INET6, socket.SOCK_DGRAM, 0, "", ("::1", 1, 0, 0)),
    }
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [found[kind] for kind in order])
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    assert remote_hosts._first_address(replace(CONFIG, master_addr="name")) == "::1"
    assert own_address("name", 1) == "::1"


class EagerConnection(SilentConnection):
    """A connection to a first host on the same machine, which is there as soon as it may be."""

    def __init__(self, *args: Any, **options: object) -> None:
        super().__init__()
        self._receiver = args[3]

    def send(self, message: bytes, peer: bytes = b"") -> None:
        self.hello = messages.decode_from_host(message)

    def start(self) -> None:
        self._receiver.connected()


def test_a_host_that_is_connected_at_once_says_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "ControlConnection", EagerConnection)
    host = HeadlessHost(replace(CONFIG, node_rank=1))
    assert host._connection.hello.node_rank == 1  # type: ignore[attr-defined]
    host.end()
    host.run()


def test_failed_handshakes_have_both_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that accepts connections and closes them looks like another secret."""
    monkeypatch.setattr(headless, "ControlConnection", SilentConnection)
    host = HeadlessHost(CONFIG)
    host.refused()
    with pytest.raises(StartupError) as caught:
        host.run()
    text = str(caught.value)
    assert "3 handshakes in a row" in text
    assert f"its ${SECRET_VARIABLE} differs" in text
    assert "a proxy" in text


class Lines(logging.Handler):
    """Queues the lines that have some text, and calls a function after some of them."""

    def __init__(self, text: str, after: int) -> None:
        super().__init__()
        self._text, self._after, self.seen = text, after, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self._after -= self._text in record.getMessage()
        if self._after == 0:
            self.seen.set()


def test_a_host_with_a_bad_address_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StartupError, match="--master-addr must be an address or a name"):
        HeadlessHost(replace(CONFIG, node_rank=1, headless=True, master_addr="a b"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("late", ["first host", "other host"])
def test_a_host_that_is_late_is_waited_for_by_name(
    late: str, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """The one that is there logs a line in each interval, and needs no help when the other one comes."""
    config = replace(CONFIG, master_port=free_port())
    texts = {"first host": f"waiting for the first host (127.0.0.1:{config.master_port})", "other host": "host 1 of 2"}
    lines = Lines(texts[late], after=2)
    logger = logging.getLogger("octavo_engine.process")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    stack.callback(logger.removeHandler, lines)
    joined: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run_first() -> None:
        hosts = RemoteHosts(config)
        stack.callback(hosts.stop, None)
        hosts.wait()
        joined.put(hosts.name_rank(1))
        hosts.stop(None)

    def run_other() -> None:
        HeadlessHost(replace(config, node_rank=1, headless=True)).run()
        joined.put("ended")

    for module in (headless, remote_hosts):
        monkeypatch.setattr(module, "_REMINDER_S", 0.01)
    both = {"first host": run_first, "other host": run_other}
    threads = [threading.Thread(target=both.pop(late)), threading.Thread(target=both.popitem()[1])]
    threads[1].start()
    assert lines.seen.wait(TIMEOUT_S)
    threads[0].start()
    assert {joined.get(timeout=TIMEOUT_S) for _ in range(2)} == {"rank 1 on host 1 (127.0.0.1)", "ended"}
    for thread in threads:
        thread.join()


def test_a_long_wait_for_other_hosts_is_a_warning(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """A script without log settings shows nothing below warnings."""
    monkeypatch.setattr(remote_hosts, "ControlConnection", SilentConnection)
    monkeypatch.setattr(remote_hosts, "_REMINDER_S", 0.01)
    hosts = RemoteHosts(replace(CONFIG, nnodes=3, tensor_parallel_size=3))
    hello = messages.HostHello(1, "10.0.0.2", common_settings(hosts._config))
    logger = logging.getLogger("octavo_engine.process")
    lines = Lines("host 2 of 3", after=2)
    lines.setLevel(logging.WARNING)
    logger.addHandler(lines)
    stack.callback(logger.removeHandler, lines)

    def wait() -> None:
        with pytest.raises(StartupError):
            hosts.wait()

    waits = threading.Thread(target=wait)
    waits.start()
    hosts.received(b"1", messages.encode(hello))
    seen = lines.seen.wait(TIMEOUT_S)
    hosts.lost(b"")
    waits.join()
    assert seen


@pytest.mark.parametrize(
    "message",
    [messages.Reported(1, None), messages.Drain(), messages.Found({}), messages.HostFailed("x")],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("joined", [b"host", None], ids=["other peer", "nobody"])
def test_messages_of_a_host_that_has_not_joined_change_nothing(
    message: messages.FromHost, joined: bytes | None, silent_hosts: RemoteHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host of an earlier engine has queued them, and its socket sends them to the next first host."""
    signals: list[int] = []
    monkeypatch.setattr(remote_hosts.os, "kill", lambda pid, number: signals.append(number))
    reports: list[Any] = []
    if joined is not None:
        silent_hosts.received(joined, messages.encode(HELLO))
        silent_hosts.wait()
        silent_hosts.start_rank(1, lambda rank, report: reports.append(report))
    silent_hosts.received(b"earlier", messages.encode(message))
    assert (reports, signals) == ([], [])


def test_a_long_wait_for_the_files_of_a_host_is_a_warning(
    silent_hosts: RemoteHosts, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """A host may download the model for an hour, which only its own log showed."""
    monkeypatch.setattr(remote_hosts, "_REMINDER_S", 0.01)
    monkeypatch.setattr(remote_hosts, "named_fingerprints", lambda *args: {"weights": "same"})
    monkeypatch.setattr(remote_hosts, "fetched_revision", lambda root: "")
    silent_hosts.received(b"1", messages.encode(HELLO))
    silent_hosts.wait()
    lines, logger = Lines("host 1 (10.0.0.2)", after=2), logging.getLogger("octavo_engine.process")
    lines.setLevel(logging.WARNING)
    logger.addHandler(lines)
    stack.callback(logger.removeHandler, lines)
    files: Any = SimpleNamespace(root=None)
    waits = threading.Thread(target=lambda: silent_hosts.check_files(files, {}))
    waits.start()
    seen = lines.seen.wait(TIMEOUT_S)
    silent_hosts.received(b"1", messages.encode(messages.Found({"weights": "same"})))
    waits.join()
    assert seen


def test_a_report_for_a_rank_that_was_not_started_changes_nothing(silent_hosts: RemoteHosts) -> None:
    """An error here would end the thread of the connection."""
    silent_hosts.received(b"1", messages.encode(HELLO))
    for rank in (-1, 0, 1, 2, 2**62):
        silent_hosts.received(b"1", messages.encode(messages.Reported(rank, None)))
    silent_hosts.wait()
    reports: list[Any] = []
    silent_hosts.start_rank(1, lambda rank, report: reports.append(report))
    silent_hosts.received(b"1", messages.encode(messages.Reported(1, messages.RankReady(1))))
    assert reports == [messages.RankReady(1)]


def test_other_hosts_learn_the_cause_at_once(silent_hosts: RemoteHosts) -> None:
    """The core may wait in gloo: then its process ends without a call of `stop`."""
    silent_hosts.received(b"1", messages.encode(HELLO))
    silent_hosts.wait()
    ranks = RankProcesses(2, 60, silent_hosts)
    silent_hosts.start_rank(1, ranks._take)
    silent_hosts.received(b"1", messages.encode(messages.Reported(1, Failed("its process was killed by signal 9."))))
    cause = messages.Goodbye("rank 1 on host 1 (10.0.0.2) failed: its process was killed by signal 9.")
    assert silent_hosts._connection.sent[-1] == (b"1", cause)  # type: ignore[attr-defined]
    ranks.stop()


def test_a_host_reports_for_its_own_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_hosts, "ControlConnection", SilentConnection)
    config, reports = replace(CONFIG, tensor_parallel_size=3, nnodes=3), list[int]()
    hosts = RemoteHosts(config)
    for number in (1, 2):
        hello = messages.HostHello(number, "10.0.0.2", common_settings(config))
        hosts.received(str(number).encode(), messages.encode(hello))
    hosts.wait()
    for rank in (1, 2):
        hosts.start_rank(rank, lambda rank, report: reports.append(rank))
        hosts.received(b"1", messages.encode(messages.Reported(rank, messages.RankReady(1))))
    assert reports == [1]


@pytest.mark.parametrize("place", ["files", "rank"])
def test_an_unexpected_error_of_a_host_reaches_the_first(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host would wait for its answer for ever, or know the end, but not its cause."""

    def fail(*args: object) -> None:
        raise OSError("no process is left")

    monkeypatch.setattr(headless, "ControlConnection", SilentConnection)
    monkeypatch.setattr(headless, "resolve_files", fail)
    monkeypatch.setattr(headless, "RankProcess", fail)
    host = HeadlessHost(CONFIG)
    asked = messages.FindFiles("model", "") if place == "files" else messages.StartRank(1)
    sent: list[messages.FromHost] = []
    monkeypatch.setattr(host._connection, "send", lambda data: sent.append(messages.decode_from_host(data)))
    host.received(b"", messages.encode(asked))
    with pytest.raises(StartupError, match="no process is left"):
        host.run()
    assert sent == [messages.HostFailed("OSError: no process is left")]


def test_a_broken_connection_ends_the_wait_for_other_hosts(silent_hosts: RemoteHosts) -> None:
    silent_hosts.lost(b"")
    with pytest.raises(StartupError, match="the connection to other hosts has failed"):
        silent_hosts.wait()


def test_a_rank_that_ended_before_it_had_its_start_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """Its start is still in a buffer, which is flushed when the pipe is closed."""
    monkeypatch.setattr(rank_processes.sys, "executable", "false")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    popen = subprocess.Popen

    def ended(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = popen(*args, **options)
        process.wait()
        return process

    monkeypatch.setattr(rank_processes.subprocess, "Popen", ended)
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    start = rank_processes.own_start(1, CONFIG, "/nowhere")
    rank = rank_processes.RankProcess(start, context.socket(zmq.PUSH), lambda *report: reports.put(report))
    rank.request_stop()
    rank.stop()
    assert reports.get(timeout=TIMEOUT_S) == (1, Failed("its process exited with code 1."))
