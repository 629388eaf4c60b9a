"""The connection of two hosts: messages, the end of a host, and a wrong secret are known at once on both sides."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from octavo_engine.process import rank_messages as messages
from octavo_engine.process.control_connection import ControlConnection
from octavo_engine.process.remote_hosts import SECRET_VARIABLE, RemoteHosts, common_settings, read_secret
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError
from octavo_testing.serve_command import free_port

SECRET, OTHER = b"a" * 32, b"b" * 32


class Events:
    """A receiver that queues its calls."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def connected(self) -> None:
        self._queue.put(("connected",))

    def received(self, peer: bytes, message: bytes) -> None:
        self._queue.put(("received", peer, message))

    def lost(self, peer: bytes) -> None:
        self._queue.put(("lost", peer))

    def refused(self) -> None:
        self._queue.put(("refused",))

    def next(self) -> tuple[Any, ...]:
        return self._queue.get(timeout=30)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(port: int, secret: bytes, events: Events, stack: ExitStack, *, listens: bool = False) -> ControlConnection:
    connection = ControlConnection(secret, "127.0.0.1", port, events, listens=listens)
    connection.start()
    stack.callback(connection.close)
    return connection


@pytest.mark.parametrize("first", [True, False], ids=["listens first", "connects first"])
def test_messages_go_both_ways_and_the_end_of_a_host_is_known(first: bool, stack: ExitStack) -> None:
    port, events = free_port(), [Events(), Events()]
    order = [0, 1] if first else [1, 0]
    ends = {side: connect(port, SECRET, events[side], stack, listens=side == 0) for side in order}
    assert events[1].next() == ("connected",)
    ends[1].send(b"hello")
    _, peer, message = events[0].next()
    assert message == b"hello"
    ends[0].send(b"welcome", peer)
    assert events[1].next() == ("received", b"", b"welcome")
    ends[1].send(b"last")
    ends[1].close()
    assert events[0].next() == ("received", peer, b"last")
    assert events[0].next() == ("lost", peer)
    ends[1].send(b"after the end")


def test_the_end_of_the_first_host_is_known(stack: ExitStack) -> None:
    port, events = free_port(), [Events(), Events()]
    listening = connect(port, SECRET, events[0], stack, listens=True)
    other = connect(port, SECRET, events[1], stack)
    assert events[1].next() == ("connected",)
    other.send(b"hello")
    _, peer, _ = events[0].next()
    listening.send(b"welcome", peer)
    assert events[1].next() == ("received", b"", b"welcome")
    listening.close()
    assert events[1].next() == ("lost", b"")


def test_a_host_without_a_message_of_the_first_host_waits_for_the_next_one(stack: ExitStack) -> None:
    port, events = free_port(), [Events(), Events()]
    first = connect(port, SECRET, events[0], stack, listens=True)
    connect(port, SECRET, events[1], stack).send(b"hello")
    assert events[0].next()[0] == "received"
    first.close()
    connect(port, SECRET, events[0], stack, listens=True)
    assert [events[1].next() for _ in range(2)] == [("connected",)] * 2


def test_another_secret_is_refused_on_both_sides(stack: ExitStack) -> None:
    port, events = free_port(), [Events(), Events()]
    connect(port, SECRET, events[0], stack, listens=True)
    connect(port, OTHER, events[1], stack).send(b"hello")
    assert [each.next() for each in events] == [("refused",)] * 2


@pytest.mark.parametrize(
    ("secret", "found"), [(None, "is not set"), ("", "is not set"), ("x" * 31, "has 31 characters")]
)
def test_a_secret_that_is_missing_or_short_is_a_line(secret: str | None, found: str) -> None:
    with pytest.raises(StartupError, match=f"OCTAVO_GROUP_SECRET {found}.*32 characters") as caught:
        read_secret({} if secret is None else {SECRET_VARIABLE: secret})
    assert not secret or secret not in str(caught.value)
    assert read_secret({SECRET_VARIABLE: "x" * 32}) == b"x" * 32


CONFIG = EngineConfig(tensor_parallel_size=2, nnodes=2, dtype="float32")


@pytest.mark.parametrize(
    ("hello", "problem"),
    [
        ({}, None),
        ({"node_rank": 2}, "--node-rank 2 must be at least 1 and below --nnodes 2."),
        ({"--dtype": "bfloat16"}, "--dtype is bfloat16 on host 1 (10.0.0.2), and float32 on the first host"),
        ({"--kv-cache-dtype": "fp8_e4m3"}, "--kv-cache-dtype is fp8_e4m3 on host 1 (10.0.0.2), and auto on the first"),
        ({"the version of Octavo": "0.0.1"}, "the version of Octavo is 0.0.1 on host 1 (10.0.0.2), and "),
    ],
    ids=str,
)
def test_a_host_that_differs_is_refused_with_both_values(
    hello: dict[str, Any], problem: str | None, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    config = replace(CONFIG, master_port=free_port())
    hosts, events = RemoteHosts(config), Events()
    stack.callback(hosts.stop, None)
    settings = common_settings(config) | {name: value for name, value in hello.items() if name != "node_rank"}
    other = connect(config.master_port, SECRET, events, stack)
    assert events.next() == ("connected",)
    other.send(messages.encode(messages.HostHello(hello.get("node_rank", 1), "10.0.0.2", settings)))
    if problem is None:
        hosts.wait()
        assert hosts.name_rank(1) == "rank 1 on host 1 (10.0.0.2)"
        return
    answer = messages.decode_to_host(events.next()[2])
    assert isinstance(answer, messages.HostRefused)
    assert answer.reason.startswith(problem)
