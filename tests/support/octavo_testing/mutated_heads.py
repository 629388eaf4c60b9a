"""Random requests with mutated heads, several per connection, and the responses that a server may give to them.

Each head keeps one intact framing line, so that the end of the request's body is known: the server must either serve
the request with that body, or refuse it and close the connection. Half the bodies are whole requests, which a server
that loses the framing would serve; their prompts begin with `SMUGGLED`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from octavo_testing.framing_attacks import H2C, SMUGGLED
from octavo_testing.raw_http import JSON_TYPE, chunks, completion_body, request_bytes

START_LINES = (
    *[b"POST /v1/completions HTTP/1.1"] * 16,
    *(b"POST  /v1/completions HTTP/1.1", b"POST /v1/completions HTTP/1.0", b"POST /v1/completions HTTP/1.1 "),
    *(b"POST /v1/completions\tHTTP/1.1", b"POST http://x/v1/completions HTTP/1.1", b"POST /v1/completions HTTP/2.0"),
    *(b"CONNECT x:1 HTTP/1.1", b"CONNECT /v1/completions HTTP/1.1", b"POST /v1/completions?a=b HTTP/1.1"),
    *(b"POST /v1/completions HTTP/1.1 x", b"post /v1/completions HTTP/1.1", b"GET /v1/completions HTTP/1.1"),
)
LINES = (
    *(b"content-length: 5", b"Content-Length:5", b"Content-Length: 0", b"Content-Length:\t5", b"content-length: 05"),
    *(b"content-length: 5,5", b"Content-Length : 5", b"content-length: 0x5", b"content-length: +5", b"content-length:"),
    *(b"transfer-encoding: chunked", b"Transfer-Encoding : chunked", b"transfer-encoding: xchunked", b"te: trailers"),
    *(b"transfer-encoding: chunked, identity", b"transfer-encoding: identity", b"transfer-encoding:\x0bchunked"),
    *(b"upgrade: h2c", b"upgrade: websocket", b"upgrade: foo", b"connection: upgrade", b"connection: Upgrade, x"),
    *(b"connection: keep-alive", b"Connection:keep-alive ", b"connection: close", b"connection: content-length"),
    *(b"proxy-connection: keep-alive", b"keep-alive: timeout=5", b"trailer: content-length", b"expect: 100-continue"),
    *(b"host: a", b"Host:", b"x: y", b"x: \xff\x80", b"x:\x0b", b"x: a\x00b", b"x:a\tb", b" folded", b"\tfolded"),
    *(b":novalue", b"a b: c", b"x_y: z", b"x: \x7f", b'"x": y', b"x: a\rb", b"x: a\nb: c", b"x" * 300 + b": y"),
    *(b"x-octavo-secret: s", b"x-octavo-tenant: evil", b"authorization: Bearer x", b"sec-websocket-version: 13"),
)
ENDS = (*[b"\r\n"] * 24, b"\n", b"\r", b"\r\n\r\n", b"\r\n ", b"")
UPGRADES = (b"", b"", b"", b"connection: upgrade\r\nupgrade: foo\r\n", b"".join(line + b"\r\n" for line in H2C))
#: Share of connections whose requests must be served, and of lines with one changed byte.
PLAIN_SHARE, CHANGED_SHARE = 0.2, 0.08
#: Share of connections whose bytes all arrive at once, and of bodies that are requests.
AT_ONCE_SHARE, SMUGGLING_SHARE = 0.6, 0.5


@dataclass(frozen=True, slots=True)
class MutatedConnection:
    """`prompts` may be served once each; `needed` must be served, in order.

    `most_answers` is the largest number of responses to the requests in the segments.
    """

    segments: tuple[bytes, ...]
    prompts: frozenset[str]
    needed: tuple[str, ...]
    most_answers: int
    num_heads: int


class HeadMutator:
    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._number = 0

    def connections(self, num_heads: int) -> Iterator[MutatedConnection]:
        while num_heads > 0:
            connection = self._connection(min(num_heads, self._dice.randint(1, 4)))
            num_heads -= connection.num_heads
            yield connection

    def _connection(self, num_heads: int) -> MutatedConnection:
        requests, prompts, most_answers = list[bytes](), list[str](), 0
        is_plain = self._dice.random() < PLAIN_SHARE
        for _ in range(num_heads):
            self._number += 1
            prompt = f"m{self._number:07d}"
            smuggles = self._dice.random() < SMUGGLING_SHARE
            body = request_bytes(completion_body(f"{SMUGGLED}-{prompt}")) if smuggles else completion_body(prompt)
            head, content = self._request(body, is_plain=is_plain)
            requests.append(head + content)
            most_answers += _num_heads_in(head)
            prompts += [] if smuggles else [prompt]
        segments, needed = self._cut(b"".join(requests)), tuple(prompts) if is_plain else ()
        return MutatedConnection(segments, frozenset(prompts), needed, most_answers, num_heads)

    def _request(self, body: bytes, *, is_plain: bool) -> tuple[bytes, bytes]:
        """Return the head and the rest of a request."""
        is_chunked = self._dice.random() < 0.3
        framing = JSON_TYPE + (b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body))
        content = chunks(body, trailers=self._dice.choice((b"", b"x: y\r\n"))) if is_chunked else body
        if is_plain:
            upgrade = self._dice.choice(UPGRADES)
            return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + upgrade + framing + b"\r\n\r\n", content
        before = self._lines(self._dice.randint(0, 2))
        after = self._lines(self._dice.randint(0, 1))
        start = self._dice.choice(START_LINES) + self._end(is_last=not before)
        return start + before + framing + b"\r\n" + after + b"\r\n", content

    def _lines(self, count: int) -> bytes:
        """Return random header lines. The last one ends with CRLF, so that the next line is separate."""
        return b"".join(self._line() + self._end(is_last=i == count - 1) for i in range(count))

    def _line(self) -> bytes:
        line = bytearray(self._dice.choice(LINES))
        if self._dice.random() < CHANGED_SHARE:
            line[self._dice.randrange(len(line))] = self._dice.randrange(256)
        return bytes(line)

    def _end(self, *, is_last: bool) -> bytes:
        return b"\r\n" if is_last else self._dice.choice(ENDS)

    def _cut(self, data: bytes) -> tuple[bytes, ...]:
        """Cut the data at random places, and at the end of the first head."""
        if self._dice.random() < AT_ONCE_SHARE:
            return (data,)
        places = {self._dice.randrange(1, len(data)) for _ in range(self._dice.randint(1, 2))}
        end = data.find(b"\r\n\r\n") + 4
        cuts = sorted(places | {end} - {len(data)})
        return tuple(data[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)), strict=True) if a < b)


def _num_heads_in(head: bytes) -> int:
    """Count the heads in a mutated head: an empty line ends a head, and the rest may get a response of its own."""
    lines = head.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return 1 + sum(not line for line in lines[:-2])
