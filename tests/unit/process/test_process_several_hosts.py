"""The hosts of one model: what each does about a host that leaves, that fails, or that sends what it does not know."""

import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from octavo_engine.process import headless, parallel_executor, remote_hosts
from octavo_engine.process import main as core_process
from octavo_engine.process import rank_messages as messages
from octavo_engine.process.control_connection import ControlConnection
from octavo_engine.process.headless import HeadlessHost
from octavo_engine.process.ipc_sockets import from_core_address, make_folder, remove_folder
from octavo_engine.process.messages import Failed, Start, decode_from_core
from octavo_engine.process.parallel_executor import ParallelExecutor, load_executor
from octavo_engine.process.rank_processes import RankProcesses, Report
from octavo_engine.process.remote_hosts import SECRET_VARIABLE, RemoteHosts, common_settings, named_fingerprints
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import LoRAModule
from octavo_engine.sources.fingerprint import adapter_fingerprint
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import EngineDead, GroupBroken, StartupError
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.scripted import ScriptedExecutor
from octavo_testing.serve_command import free_port

CONFIG = EngineConfig(model="model", tensor_parallel_size=2, nnodes=2)
SECRET = "a secret of the hosts in these tests"
PEER, HELLO = b"peer", messages.encode(messages.HostHello(1, "10.0.0.2", common_settings(CONFIG)))


class SilentConnection:
    """In the place of a `ControlConnection`: holds what is sent."""

    def __init__(self, *args: object, **options: object) -> None:
        self.sent: list[tuple[bytes, bytes]] = []

    def send(self, message: bytes, peer: bytes = b"") -> None:
        self.sent.append((peer, message))

    def start(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    for module in (remote_hosts, headless):
        monkeypatch.setattr(module, "ControlConnection", SilentConnection)


@pytest.mark.usefixtures("silent")
def test_the_ranks_of_a_host_that_leaves_before_they_start_have_failed() -> None:
    """The first host finds and plans the model meanwhile, which may take minutes."""
    hosts, reports = RemoteHosts(CONFIG), list[Report]()
    hosts.received(PEER, HELLO)
    hosts.wait()
    hosts.lost(PEER)
    hosts.start_rank(1, lambda *report: reports.append(report))
    assert reports == [(1, Failed("the host has ended, or gave no sign of life for 5 s.")), (1, None)]


@pytest.mark.usefixtures("silent")
def test_a_host_that_says_hello_twice_has_joined_once() -> None:
    """Its first hello waits in its socket if the first host ends meanwhile, and is sent with that to the next one."""
    hosts = RemoteHosts(CONFIG)
    hosts.received(PEER, HELLO)
    hosts.received(PEER, HELLO)
    hosts.wait()
    hosts.received(PEER, HELLO)
    assert hosts._connection.sent == []  # type: ignore[attr-defined]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("address", ["a..b", "a" * 64])
def test_an_address_that_is_no_name_is_refused(address: str) -> None:
    with pytest.raises(StartupError, match=f"^--master-addr {address}: .*must be one address of this host"):
        RemoteHosts(replace(CONFIG, master_addr=address))


def model_files() -> ModelFiles:
    return ModelFiles(name="m", root=Path("/m"), load_format="dummy", config={}, weight_files=())


@contextmanager
def headless_host(config: EngineConfig) -> Iterator[HeadlessHost]:
    host = HeadlessHost(config)
    try:
        yield host
    finally:
        host._stop()


FINGERPRINT = named_fingerprints(CONFIG, model_files(), {})


@pytest.mark.usefixtures("silent")
def test_the_first_host_names_another_hosts_adapter_with_both_fingerprints(tmp_path: Path) -> None:
    """The first host sends the location that was given to it, and not the folder where it found the adapter."""
    own = write_adapter(tmp_path, llama_pairs())
    hosts = RemoteHosts(
        replace(CONFIG, lora_modules=(LoRAModule(name="a", path="hf://org/a"), LoRAModule(name="b", path="hf://org/b")))
    )
    hosts.received(PEER, HELLO)
    hosts.wait()
    good = adapter_fingerprint(own)
    hosts.received(PEER, messages.encode(messages.Found(FINGERPRINT | {"adapter a": good, "adapter b": "0" * 64})))
    with pytest.raises(StartupError, match="does not have the adapter b of this host") as caught:
        hosts.check_files(model_files(), {"a": own, "b": own})
    text = str(caught.value)
    assert "host 1 (10.0.0.2)" in text
    assert f"{'0' * 16} and {good[:16]}" in text
    ((_, sent),) = hosts._connection.sent  # type: ignore[attr-defined]
    asked = messages.decode_to_host(sent)
    assert asked == messages.FindFiles("model", "", {"a": ("hf://org/a", ""), "b": ("hf://org/b", "")})


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("own", "location", "found"),
    [(None, "same", True), ("other", "/nowhere", True), ("/nowhere", "same", False), (None, "/nowhere", False)],
)
def test_a_host_finds_an_adapter_where_its_own_settings_have_it(
    own: str | None, location: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, seed in (("same", 1), ("other", 2)):
        write_adapter(tmp_path / folder, llama_pairs(seed=seed))
    modules = () if own is None else (LoRAModule(name="a", path=str(tmp_path / own)),)
    monkeypatch.setattr(headless, "resolve_files", lambda config: model_files())
    with headless_host(replace(CONFIG, lora_modules=modules)) as host:
        host._find_files(messages.FindFiles("model", "", {"a": (str(tmp_path / location), "")}))
    ((_, sent),) = host._connection.sent  # type: ignore[attr-defined]
    answer = messages.decode_from_host(sent)
    if found:
        assert answer == messages.Found(FINGERPRINT | {"adapter a": adapter_fingerprint(tmp_path / (own or location))})
        return
    assert isinstance(answer, messages.HostFailed)
    assert answer.message.startswith(f"adapter a ({tmp_path / location} on the first host): /nowhere")
    assert "--lora-modules a=FOLDER" in answer.message


@pytest.mark.usefixtures("silent")
def test_a_commit_of_the_hub_is_that_of_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has another location for the adapter takes no commit of the first one."""
    folder, revisions = write_adapter(tmp_path, llama_pairs()), list[str | None]()
    monkeypatch.setattr(headless, "resolve_files", lambda config: model_files())
    monkeypatch.setattr(headless, "locate_adapter", lambda *args, revision: revisions.append(revision) or folder)
    for own in ((), (LoRAModule(name="a", path="org/b"),)):
        with headless_host(replace(CONFIG, lora_modules=own)) as host:
            for location in ("org/a", "hf://org/a", "s3://org/a", "ms://org/a"):
                host._find_files(messages.FindFiles("model", "", {"a": (location, "c0ffee")}))
    assert revisions == ["c0ffee", "c0ffee", None, None, *[None] * 4]


UNKNOWN = pytest.mark.parametrize("message", [b"", b"\xc1", messages.encode({"type": "Later"})])


@UNKNOWN
@pytest.mark.usefixtures("silent")
def test_a_host_that_sends_unknown_messages_is_refused_or_fails(message: bytes) -> None:
    hosts, reports = RemoteHosts(CONFIG), list[Report]()
    hosts.received(b"other", message)
    ((peer, answer),) = hosts._connection.sent  # type: ignore[attr-defined]
    assert peer == b"other"
    assert isinstance(messages.decode_to_host(answer), messages.HostRefused)
    hosts.received(PEER, HELLO)
    hosts.wait()
    hosts.start_rank(1, lambda *report: reports.append(report))
    hosts.received(PEER, message)
    assert [type(report) for _, report in reports] == [Failed, type(None)]


@UNKNOWN
@pytest.mark.usefixtures("silent")
def test_unknown_messages_of_the_first_host_end_another(message: bytes) -> None:
    host = HeadlessHost(CONFIG)
    host.received(b"", message)
    with pytest.raises(StartupError, match="another version"):
        host.run()


@pytest.mark.usefixtures("silent")
def test_a_host_without_a_route_to_the_first_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> str:
        raise OSError("Name or service not known")

    host = HeadlessHost(CONFIG)
    monkeypatch.setattr(headless, "own_address", fail)
    host.connected()
    with pytest.raises(StartupError, match="Name or service not known"):
        host.run()


class BadReceiver:
    """Fails at the first message."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()

    def connected(self) -> None:
        self.events.put("connected")

    def received(self, peer: bytes, message: bytes) -> None:
        raise AssertionError("a fault")

    def lost(self, peer: bytes) -> None:
        self.events.put("lost")

    def refused(self) -> None:
        self.events.put("refused")


def test_a_host_whose_connection_has_a_fault_gets_to_know_it() -> None:
    port, receivers = free_port(), [BadReceiver(), BadReceiver()]
    first, other = (
        ControlConnection(SECRET.encode(), "127.0.0.1", port, receiver, listens=listens)
        for receiver, listens in zip(receivers, (True, False), strict=True)
    )
    first.start()
    other.start()
    try:
        assert receivers[1].events.get(timeout=60) == "connected"
        other.send(b"a message")
        assert receivers[0].events.get(timeout=10) == "lost"
    finally:
        first.close()
        other.close()


class OtherHosts:
    """In the place of `RemoteHosts`: all have joined. `ends`: the reasons for which they ended."""

    def __init__(self, config: EngineConfig) -> None:
        self.ends: list[str | None] = []

    def wait(self) -> None: ...

    def stop(self, reason: str | None) -> None:
        self.ends.append(reason)


@pytest.mark.parametrize("error", [StartupError("no such model"), GroupBroken("rank 1 is late"), ValueError()])
def test_other_hosts_get_the_error_of_a_start(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts would end without one as if the engine had been stopped, and no supervisor would start them again."""
    hosts = OtherHosts(CONFIG)

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(parallel_executor, "RemoteHosts", lambda config: hosts)
    monkeypatch.setattr(parallel_executor, "load", fail)
    monkeypatch.setattr(parallel_executor.RankProcesses, "find_cause", lambda self, error: EngineDead(str(error)))
    with pytest.raises((StartupError, ValueError)):
        load_executor(CONFIG)
    assert hosts.ends == [str(error) or "ValueError"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(EngineDead("rank 1 is late"), "rank 1 is late"), (ValueError(), "the engine core has failed"), (None, "None")],
)
def test_the_executor_gets_the_error_of_the_engine_core(
    error: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*args: object) -> None:
        if error is not None:
            raise error

    reasons: list[str | None] = []
    monkeypatch.setattr(core_process, "serve", serve)
    monkeypatch.setattr(core_process, "freeze_gc", lambda: None)
    monkeypatch.setattr(ScriptedExecutor, "shutdown", lambda self, reason=None: reasons.append(reason))
    start = Start(config=EngineConfig(), loader="octavo_testing.scripted:load", folder="/tmp/o", parent_pid=1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://core")
    outbox.connect("inproc://core")
    try:
        with suppress(ValueError):
            core_process.run(start, inbox, outbox)
    finally:
        context.destroy(linger=0)
    (found,) = map(str, reasons)
    assert found.startswith(reason)


@pytest.mark.parametrize("reason", [None, "rank 1 is late"])
def test_other_hosts_get_the_error_of_the_executor(reason: str | None) -> None:
    hosts = OtherHosts(CONFIG)
    ranks = RankProcesses(1, 60, hosts)  # type: ignore[arg-type]
    ParallelExecutor(ScriptedExecutor(), ranks).shutdown(reason)  # type: ignore[arg-type]
    assert hosts.ends == [reason]


def test_the_cause_of_a_stuck_core_arrives_without_the_folder_of_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is removed at the core's hello, which comes right after the socket is made."""
    exit_codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(core_process, "STUCK_S", 0.0)
    monkeypatch.setattr(core_process.os, "_exit", exit_codes.put)
    folder = make_folder()
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        inbox.bind(from_core_address(folder))
        end_soon = core_process.end_if_stuck(from_core_address(folder))
        remove_folder(folder)
        end_soon(EngineDead("host 1 is lost"))
        assert exit_codes.get(timeout=60) == 1
        assert inbox.poll(1000)
        assert decode_from_core(inbox.recv()) == Failed("host 1 is lost")


def test_a_stranger_cannot_make_the_first_host_hold_much() -> None:
    """One that has not proved the secret announces a frame of 1 GiB: its connection is closed at once."""
    port = free_port()
    first = ControlConnection(SECRET.encode(), "127.0.0.1", port, BadReceiver(), listens=True)
    first.start()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:  # half of the time for handshakes
            stranger.sendall(greeting)
            received = b""
            while len(received) < len(greeting):
                received += stranger.recv(64)
            stranger.sendall(b"\x06" + (1 << 30).to_bytes(8, "big") + bytes(1000))
            with suppress(ConnectionResetError):
                assert stranger.recv(64) == b""
    finally:
        first.close()
