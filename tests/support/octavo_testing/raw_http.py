"""An HTTP client that sends exactly the bytes a test gives it, in the segments a test asks for, and parses all answers.

Servers under attack answer more or less often than they were asked, so answers are counted and never matched by hand.
"""

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import httptools

ANSWER_TIMEOUT_S = 10.0
#: Between two segments, so that the server reads them apart. Segments that still arrive together make a test weaker,
#: never wrong.
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
        """The completion; empty where there is none."""
        try:
            return str(json.loads(self.body)["choices"][0]["text"])
        except (ValueError, KeyError, TypeError, IndexError):
            return ""


def completion_body(prompt: str) -> bytes:
    """Both servers answer it with a text that begins with the prompt."""
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "echo": True}).encode()


def request_bytes(
    body: bytes, *, method: bytes = b"POST", lines: Iterable[bytes] = (), is_chunked: bool = False
) -> bytes:
    """`lines`: header lines without their ends."""
    framing = b"Transfer-Encoding: chunked\r\n" if is_chunked else b"Content-Length: %d\r\n" % len(body)
    head = method + b" " + PATH + b" HTTP/1.1\r\nHost: x\r\n" + JSON_TYPE + b"".join(line + b"\r\n" for line in lines)
    return head + framing + b"\r\n" + (chunks(body) if is_chunked else body)


def chunks(body: bytes, *, trailers: bytes = b"") -> bytes:
    """`trailers`: whole lines."""
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


class RawConnection:
    """One connection. Each answer is in `answers` as soon as its head is there."""

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
        """A server may refuse the rest by closing the connection: that is seen when answers are read."""
        with suppress(ConnectionError):
            for number, segment in enumerate(segments):
                if number:
                    await asyncio.sleep(pause_s)
                self._writer.write(segment)
                await self._writer.drain()

    async def read_answers(self, count: int, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        """All complete answers so far; returns at `count` of them or at the connection's end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.complete) < count and not self.is_closed:
                    await self._read()
        return self.complete

    async def read_to_end(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        return await self.read_answers(1 << 30, timeout_s=timeout_s)

    @property
    def complete(self) -> list[Answer]:
        """Interim answers aren't counted."""
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
    """One completion over a connection of its own."""
    async with await RawConnection.open(port) as connection:
        await connection.send(request_bytes(completion_body(prompt)))
        answers = await connection.read_answers(1, timeout_s=timeout_s)
        assert answers, f"the request {prompt!r} got no answer {connection.fault}"
        return answers[0]
