"""A relayed response leaves its tenant's place before the client has its end."""

from typing import Any

import pytest
from octavo_server.router.proxy.relay import relay
from octavo_server.router.proxy.sse import Dialect

STREAM = [(b"content-type", b"text/event-stream")]


class Response:
    """An upstream response whose chunks arrive one after another, and its end after them."""

    def __init__(self, headers: list[tuple[bytes, bytes]], chunks: list[bytes], *, is_complete: bool) -> None:
        self.status, self.headers, self.is_complete = 200, headers, is_complete
        self.is_stream = headers == STREAM
        self._chunks = chunks

    def take_chunks(self) -> bytes:
        return b"".join(self._chunks)

    async def next_chunk(self) -> bytes:
        if not self._chunks:
            self.is_complete = True
            return b""
        return self._chunks.pop(0)


class Client:
    def __init__(self, dialect: Dialect) -> None:
        self.dialect, self.framer, self.seen = dialect, None, list[bytes | str]()

    async def start(self, status: int, headers: object) -> None: ...

    async def write(self, data: bytes) -> None:
        self.seen.append(data)

    finish = write

    def leave(self) -> None:
        if "end" not in self.seen:
            self.seen.append("end")


@pytest.mark.parametrize(
    ("dialect", "last"),
    [
        ("chunks", b"data: [DONE]\n\n"),
        ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("events", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
        ("events", b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n'),
    ],
)
@pytest.mark.parametrize("num_pieces", [1, 2])
async def test_a_stream_leaves_its_place_before_its_last_event(dialect: Dialect, last: bytes, num_pieces: int) -> None:
    """The end of its connection may arrive later, and its last event in pieces."""
    first, at = b'data: {"text":"a"}\n\n', len(last) // num_pieces
    pieces = [piece for piece in (last[:at], last[at:]) if piece]
    client: Any = Client(dialect)
    response: Any = Response(STREAM, [first, *pieces], is_complete=False)
    await relay(response, [], client, client.leave)
    assert client.seen == [first, "end", last, b""]


async def test_other_responses_leave_their_place_before_their_last_bytes() -> None:
    client: Any = Client("chunks")
    response: Any = Response([], [b"{}"], is_complete=True)
    await relay(response, [], client, client.leave)
    assert client.seen == ["end", b"{}"]
    client = Client("chunks")
    response = Response([], [b"{", b"}"], is_complete=False)
    await relay(response, [], client, client.leave)
    assert client.seen == [b"{", b"}", "end", b""]
