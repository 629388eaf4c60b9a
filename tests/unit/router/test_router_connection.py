"""A connection to a replica: framing, surplus bytes, trailers, stale connections, silent replicas, dropped headers."""

import asyncio
import gc
import socket
import weakref

import pytest
from octavo_server.openai.errors import ReplicaLost, ReplicaTimeout
from octavo_server.router.upstream.connection import (
    MAX_FRAMING_BYTES,
    STALE_AFTER_IDLE_S,
    Connection,
    NotReached,
    StaleConnection,
)
from octavo_server.router.upstream.headers import NOT_FORWARDED, request_head, response_headers
from octavo_server.router.upstream.pool import ConnectionPool
from octavo_testing.fleets import until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nreal"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class FakeTransport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.state = "open"

    def write(self, data):
        pass

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.state != "open"

    def close(self):
        self.state = "closed"

    def abort(self):
        self.state = "aborted"


class Peer:
    """One connection whose other end is the test."""

    def __init__(self):
        self.idle, self.lost = [], []
        self.connection = Connection(asyncio.get_running_loop(), on_idle=self.idle.append, on_lost=self.lost.append)
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)

    def answer(self, *pieces):
        response = self.connection.start(b"POST / HTTP/1.1\r\n\r\n", 10.0)
        for piece in pieces:
            self.connection.data_received(piece)
        return response


async def test_a_connection_carries_several_responses_in_turn():
    peer = Peer()
    assert peer.answer(OK).take_chunks() == b"real"
    assert peer.answer(OK[:20], OK[20:]).take_chunks() == b"real"
    assert (len(peer.idle), peer.transport.state) == (2, "open")


@pytest.mark.parametrize("surplus", [b"H", b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nOVER!!", b"\0"], ids=str)
async def test_bytes_behind_a_complete_response_end_the_connection(surplus):
    peer = Peer()
    response = peer.answer(OK + surplus)
    assert (response.is_complete, peer.idle) == (True, []) or isinstance(response.error, ReplicaLost)
    assert peer.transport.state != "open"


async def test_bytes_without_a_request_end_the_connection():
    peer = Peer()
    peer.answer(OK)
    peer.connection.data_received(b"HTTP")
    assert peer.transport.state == "aborted"


async def test_trailers_are_dropped():
    peer = Peer()
    response = peer.answer(CHUNKED + b"4\r\nreal\r\n0\r\nx-evil: 1\r\n\r\n")
    assert (response.take_chunks(), [name for name, _ in response.headers]) == (b"real", [b"transfer-encoding"])
    assert peer.transport.state == "open"


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n", CHUNKED + b"4\r\nreal\r\n0\r\n"], ids=["head", "trailers"])
async def test_endless_headers_and_trailers_end_the_connection(start):
    peer = Peer()
    response = peer.answer(start, *[b"a: b\r\n" * 1000] * (MAX_FRAMING_BYTES // 6000 + 1))
    assert isinstance(response.error, ReplicaLost)
    assert peer.transport.state == "aborted"


@pytest.mark.parametrize(("idle_s", "is_stale"), [(0.0, False), (STALE_AFTER_IDLE_S + 1, True)])
async def test_only_a_long_idle_connection_can_be_stale(idle_s, is_stale):
    peer = Peer()
    peer.answer(OK)
    peer.connection.idle_since_s = asyncio.get_running_loop().time() - idle_s
    response = peer.answer()
    peer.connection.connection_lost(None)
    assert isinstance(response.error, StaleConnection) == is_stale
    assert isinstance(response.error, ReplicaLost)


async def test_a_lost_connection_is_freed_without_a_garbage_collection():
    connection = Connection(asyncio.get_running_loop(), on_idle=id, on_lost=id)
    connection.connection_made(FakeTransport())
    connection.start(b"GET / HTTP/1.1\r\n\r\n", 10.0)
    connection.data_received(OK)
    freed = weakref.ref(connection)
    gc.disable()
    try:
        connection.connection_lost(None)
        del connection
        assert freed() is None
    finally:
        gc.enable()


async def test_a_loss_after_the_first_byte_is_not_stale():
    peer = Peer()
    peer.answer(OK)
    peer.connection.idle_since_s = asyncio.get_running_loop().time() - 60
    response = peer.answer(b"HTTP")
    peer.connection.connection_lost(None)
    assert not isinstance(response.error, StaleConnection)


@pytest.mark.parametrize(("num_bytes", "error"), [(1000, ReplicaTimeout), (2**24, NotReached)], ids=["whole", "part"])
async def test_a_request_that_a_silent_replica_has_received_is_not_retried(num_bytes, error):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its host accepts connections and some bytes
        pool = ConnectionPool(f"http://127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=5.0)
        sending = asyncio.create_task(pool.send(b"x" * num_bytes, 60.0))
        await until(lambda: pool.active)
        (connection,) = pool.active
        await until(lambda: connection.is_delivered or num_bytes > 1000)
        pool.fail_waiting(begun_limit_s=60.0)
        with pytest.raises(error):
            await sending
        pool.close()


HOPS = [(b"connection", b"keep-alive"), (b"connection", b"X-Hop, close"), (b"x-hop", b"1"), (b"x-kept", b"1")]


def test_headers_named_by_any_connection_header_are_dropped():
    sent = request_head(b"/", HOPS, b"replica", 0, without=NOT_FORWARDED, extra=b"")
    assert (b"x-hop" in sent, b"x-kept" in sent) == (False, True)
    assert response_headers(200, HOPS, whole_bytes=None, keeps_own=True) == [(b"x-kept", b"1")]


def test_a_response_without_content_has_no_length():
    assert response_headers(204, [(b"content-length", b"0")], whole_bytes=0, keeps_own=True) == []
    assert response_headers(200, [], whole_bytes=0, keeps_own=True) == [(b"content-length", b"0")]


def test_replica_headers_reach_clients_only_if_enabled():
    headers = [(b"x-octavo-cached-tokens", b"48"), (b"x-other", b"1")]
    assert response_headers(200, headers, whole_bytes=None, keeps_own=False) == [(b"x-other", b"1")]
    assert response_headers(200, headers, whole_bytes=None, keeps_own=True) == headers
