"""Heads of requests as nearly all clients write them, read narrowly and remembered whole.

The heads of one client's requests differ in the length of the body, if at all. What isn't plain isn't read here: llhttp
has the last word on it. So what is read has to be what llhttp would accept, too, and to be read by it alike.
"""

import re

Headers = list[tuple[bytes, bytes]]

END = b"\r\n\r\n"
#: Longer ones are rare, and so much is remembered: 1 MB.
MAX_PLAIN_BYTES, MAX_KNOWN = 2048, 512
_FIELD = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n"
_PLAIN = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:" + _FIELD + rb")+)\r\n")
#: They say how the connection is used, or how the body comes.
_NOT_PLAIN = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"proxy-connection"})
_LENGTH = re.compile(rb"[0-9]{1,9}")


class PlainHead:
    """`headers`: names in lower case. They are shared by requests, and stay as they are."""

    __slots__ = ("body_bytes", "headers", "path")

    def __init__(self, path: bytes, headers: Headers, body_bytes: int) -> None:
        self.path = path
        self.headers = headers
        self.body_bytes = body_bytes


class PlainHeads:
    """`paths`: of the requests whose heads are read, as they are in requests."""

    __slots__ = ("_known", "_paths")

    def __init__(self, paths: frozenset[bytes]) -> None:
        self._paths = paths
        self._known: dict[bytes, PlainHead | None] = {}

    def begins(self, data: bytes) -> int:
        """How long the head is that `data` begins with; 0 if it isn't plain, or has no end in it."""
        end = data.find(END, 0, MAX_PLAIN_BYTES) if data.startswith(b"POST ") else -1
        return end + len(END) if end >= 0 else 0

    def read(self, head: bytes) -> PlainHead | None:
        """With its end. None for one that isn't plain, or of another path."""
        try:
            return self._known[head]
        except KeyError:
            pass
        found = self._read(head)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[head] = found
        return found

    def _read(self, head: bytes) -> PlainHead | None:
        plain = _PLAIN.fullmatch(head)
        if plain is None or plain[1] not in self._paths:
            return None
        headers = [_field(line) for line in plain[2].split(b"\r\n")[:-1]]
        lengths = [value for name, value in headers if name == b"content-length"]
        if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
            return None
        for name, value in headers:
            if name in _NOT_PLAIN or (name == b"connection" and value.lower() != b"keep-alive"):
                return None
        return PlainHead(plain[1], headers, int(lengths[0]))


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.lower(), value.lstrip(b" \t")  # llhttp leaves what follows
