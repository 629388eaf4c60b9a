"""A listener of the KV stream that doesn't read is dropped, and neither the engine nor other listeners wait."""

import asyncio
import socket
import urllib.parse

import pytest
from octavo_engine.wire.kv_stream import KVChange, roll, run_together
from octavo_engine.wire.records import EngineStats
from octavo_server.kv.frames import Bye, FrameReader, Snapshot, Step
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

pytestmark = pytest.mark.slow

BLOCKS_A_STEP = 4096


@pytest.fixture
def engine(tmp_path):
    return ScriptedClient(write_byte_model(tmp_path))


def stepper(engine):
    """Each call publishes one step that stored many blocks, as the engine would."""
    digest, num_stored = 0, 0

    def step():
        nonlocal digest, num_stored
        stored = range(num_stored, num_stored + BLOCKS_A_STEP)
        num_stored, digest = num_stored + BLOCKS_A_STEP, roll(digest, "device", stored)
        change = KVChange(stored=run_together(stored), digest=digest)
        engine.on_kv(change, EngineStats())

    return step


async def not_reading(url):
    """A listener that requests the stream and reads nothing, with the smallest socket buffers."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    address = urllib.parse.urlsplit(url)
    sock.connect((address.hostname, address.port))
    sock.sendall(b"GET /kv/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    sock.setblocking(False)
    return sock


async def until(is_so):
    async with asyncio.timeout(120):
        while not is_so():
            await asyncio.sleep(0.005)


async def test_a_listener_that_does_not_read_is_dropped_alone(engine):
    async with serving(engine, slow_client_timeout=0.2) as served:
        publisher = served.server._context.kv
        with await not_reading(served.url):
            await until(lambda: publisher.num_listeners == 1)
            step, reader = stepper(engine), FrameReader()
            async with served.http.stream("GET", "/kv/events") as response, asyncio.timeout(120):
                chunks, seq = response.aiter_raw(), 0
                while seq < 300 or publisher.num_listeners > 1:
                    step()
                    while seq < publisher._seq:  # a listener that reads has each step before the next one
                        seq = max([seq, *(f.seq for f in reader.feed(await anext(chunks)) if isinstance(f, Step))])


async def test_a_late_reader_gets_the_sent_frames_and_the_reason(engine):
    async with serving(engine) as served:
        publisher = served.server._context.kv
        publisher.max_backlog_bytes = 2**20
        with await not_reading(served.url) as slow:
            await until(lambda: publisher.num_listeners == 1)
            step = stepper(engine)
            for _ in range(200):  # 6.5 MB: more than socket buffers and backlog together
                step()
            frames = await read_all(slow)
        byes = [frame for frame in frames if isinstance(frame, Bye)]
        assert "slow reader: more than 1048576 bytes behind" in byes[0].reason
        assert frames[-1] is byes[0]
        assert any(isinstance(frame, Snapshot) for frame in frames)
        await until(lambda: publisher.num_listeners == 0)


async def read_all(sock):
    """Read the frames of the chunked response to its end."""
    loop, received = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(120):
        while not received.endswith(b"\r\n0\r\n\r\n"):
            data = await loop.sock_recv(sock, 2**16)
            assert data, "the connection was cut"
            received += data
    body = bytes(received).partition(b"\r\n\r\n")[2]
    reader, frames = FrameReader(), []
    while body:
        size, _, rest = body.partition(b"\r\n")
        frames += reader.feed(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return frames
