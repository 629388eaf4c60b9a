"""Requests that make a careless server and the proxy before it disagree on where a request ends.

`SMUGGLED` prompts are inside the bodies of other requests: no replica and no engine may ever receive one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from octavo_testing.raw_http import chunks, completion_body, request_bytes

SMUGGLED = "smuggled"
FOREIGN = (b"Connection: upgrade", b"Upgrade: foo")
#: Headers that the JDK's HttpClient sends to http:// URLs.
H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA")


@dataclass(frozen=True, slots=True)
class Attack:
    """`served`: prompts that must be answered with 200, in order. `num_requests`: requests in the segments."""

    segments: tuple[bytes, ...]
    num_requests: int = 1
    served: tuple[str, ...] = ()


def smuggling(prompt: str = SMUGGLED) -> bytes:
    """Return a whole request, to be used as the body of another one."""
    return request_bytes(completion_body(prompt))


def in_segments(request: bytes, is_split: bool) -> tuple[bytes, ...]:
    """Split the request after its head, as a proxy that doesn't buffer bodies forwards it, if `is_split`."""
    head, blank, body = request.partition(b"\r\n\r\n")
    return (head + blank, body) if is_split else (request,)


def _upgrade_with_body(name: str, *, is_split: bool, is_chunked: bool = False) -> Attack:
    request = request_bytes(completion_body(name), lines=H2C, is_chunked=is_chunked)
    return Attack(in_segments(request, is_split), served=(name,))


def _upgrade_with_pipelined(name: str, *, is_split: bool) -> Attack:
    first, second = f"{name}-first", f"{name}-second"
    *before, last = in_segments(request_bytes(completion_body(first), lines=H2C), is_split)
    segments = (*before, last + request_bytes(completion_body(second)))
    return Attack(segments, num_requests=2, served=(first, second))


def _upgrade_smuggles(_: str, *, is_split: bool) -> Attack:
    return Attack(in_segments(request_bytes(smuggling(), lines=FOREIGN), is_split))


def _upgrade_smuggles_chunked(_: str, *, is_split: bool) -> Attack:
    """Smuggle a request in a segment of its own: a parser that lost the framing would reject a chunk size before it."""
    head, size, rest = request_bytes(smuggling(), lines=FOREIGN, is_chunked=True).partition(
        b"%x\r\n" % len(smuggling())
    )
    return Attack((head, size, rest) if is_split else (head + size + rest,))


def _connect(_: str, *, is_split: bool) -> Attack:
    return Attack(in_segments(request_bytes(smuggling(), method=b"CONNECT"), is_split))


def _trailers(name: str, *, is_split: bool) -> Attack:
    """Send headers that a proxy in front filters from heads as trailers."""
    trailers = b"x-evil: 1\r\nx-octavo-secret: s\r\nx-octavo-tenant: evil\r\nx-request-id: evil\r\n"
    body = completion_body(name)
    head, blank, _ = request_bytes(body, is_chunked=True).partition(b"\r\n\r\n")
    return Attack(in_segments(head + blank + chunks(body, trailers=trailers), is_split), served=(name,))


def _framing_trailers(_: str, *, is_split: bool) -> Attack:
    """Send a content-length as a trailer: a server may refuse the request, but not read the next one as its body."""
    body = completion_body("framing-trailers")
    head, blank, _ = request_bytes(body, is_chunked=True).partition(b"\r\n\r\n")
    trailers = b"content-length: %d\r\n" % len(smuggling())
    return Attack(in_segments(head + blank + chunks(body, trailers=trailers) + smuggling("behind"), is_split), 2)


#: Name -> function that makes the attack with a given prompt.
ATTACKS: dict[str, Callable[[str], Attack]] = {
    "upgrade-body-in-head-segment": lambda name: _upgrade_with_body(name, is_split=False),
    "upgrade-body-later": lambda name: _upgrade_with_body(name, is_split=True),
    "upgrade-chunked": lambda name: _upgrade_with_body(name, is_split=False, is_chunked=True),
    "upgrade-chunked-later": lambda name: _upgrade_with_body(name, is_split=True, is_chunked=True),
    "upgrade-pipelined": lambda name: _upgrade_with_pipelined(name, is_split=False),
    "upgrade-pipelined-later": lambda name: _upgrade_with_pipelined(name, is_split=True),
    "upgrade-smuggles": lambda name: _upgrade_smuggles(name, is_split=False),
    "upgrade-smuggles-later": lambda name: _upgrade_smuggles(name, is_split=True),
    "upgrade-smuggles-chunked": lambda name: _upgrade_smuggles_chunked(name, is_split=False),
    "upgrade-smuggles-chunked-later": lambda name: _upgrade_smuggles_chunked(name, is_split=True),
    "connect-smuggles": lambda name: _connect(name, is_split=False),
    "connect-smuggles-later": lambda name: _connect(name, is_split=True),
    "trailers": lambda name: _trailers(name, is_split=False),
    "framing-trailers": lambda name: _framing_trailers(name, is_split=False),
    "trailers-later": lambda name: _trailers(name, is_split=True),
}
