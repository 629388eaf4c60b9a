"""An HTTP client that sends exactly the bytes and segments that a test gives, and parses all responses.

A server under attack may send more or fewer responses than there were requests, so responses are counted.
"""

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import httptools

ANSWER_TIMEOUT_S = 120.0
#: Seconds between two segments, so that the server reads them separately. Segments that still arrive together make a
#: test weaker, not wrong.
SEGMENT_PAUSE_S = 0.02
MODEL = "tiny"
PATH = b"/v1/completions"
JSON_TYPE = b"Content-Type: application/json\r\n"


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    @property
    def text(self) -> str:
        """Text of the completion; empty if the response has none."""
        try:
            return str(json.loads(self.body)["choices"][0]["text"])
        except (ValueError, KeyError, TypeError, IndexError):
            return ""


def completion_body(prompt: str) -> bytes:
    """Return a completion request whose answer begins with the prompt, from router and engine alike."""
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "echo": True}).encode()


def request_bytes(
    body: bytes, *, method: bytes = b"POST", lines: Iterable[bytes] = (), is_chunked: bool = False
) -> bytes:
    """`lines`: header lines without their ends."""
    framing = b"Transfer-Encoding: chunked\r\n" if is_chunked else b"Content-Length: %d\r\n" % len(body)
    head = method + b" " + PATH + b" HTTP/1.1\r\nHost: localhost\r\n" + JSON_TYPE
    head += b"".join(line + b"\r\n" for line in lines)
    return head + framing + b"\r\n" + (chunks(body) if is_chunked else body)


def chunks(body: bytes, *, trailers: bytes = b"") -> bytes:
    """`trailers`: whole lines."""
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


class RawConnection:
    """One connection. Each response is in `answers` as soon as its head has arrived."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answers: list[Answer] = []
        self.fault = ""  # the bytes received aren't HTTP
        self.is_closed = False
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, *segments: bytes, pause_s: float = SEGMENT_PAUSE_S) -> None:
        """Send the segments. A connection that the server closes meanwhile is noticed when responses are read."""
        with suppress(ConnectionError):
            for number, segment in enumerate(segments):
                if number:
                    await asyncio.sleep(pause_s)
                self._writer.write(segment)
                await self._writer.drain()

    async def read_answers(self, count: int, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        """Return all complete responses, after `count` of them, the end of the connection or the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.complete) < count and not self.is_closed:
                    await self._read()
        return self.complete

    async def read_to_end(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        return await self.read_answers(1 << 30, timeout_s=timeout_s)

    @property
    def complete(self) -> list[Answer]:
        """Complete responses without interim ones (1xx)."""
        return [answer for answer in self.answers if answer.is_complete and answer.status >= 200]

    async def close(self) -> None:
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            data = b""
        self.is_closed = not data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fault = f"{error}: {data[:500]!r}"
            self.is_closed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answers.append(Answer(self._parser.get_status_code(), self._headers))
        self._headers = {}

    def on_body(self, body: bytes) -> None:
        self.answers[-1].body += body

    def on_message_complete(self) -> None:
        self.answers[-1].is_complete = True


async def ask(port: int, prompt: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """Request one completion over a new connection."""
    async with await RawConnection.open(port) as connection:
        await connection.send(request_bytes(completion_body(prompt)))
        answers = await connection.read_answers(1, timeout_s=timeout_s)
        assert answers, f"the request {prompt!r} got no answer {connection.fault}"
        return answers[0]
