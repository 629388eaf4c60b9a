"""Heads of requests and answers on their way through: what belongs to one connection only stays behind, and so does
what only a router may say to a replica (`x-octavo-*`). Everything else goes through as it came.
"""

from collections.abc import Collection

Headers = list[tuple[bytes, bytes]]

OURS = b"x-octavo-"
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
#: The framing is the connection's; the id is said once, by us.
NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
#: uvicorn says the date; which pages may read the answer is decided here.
NOT_SENT_BACK = _HOP_BY_HOP | {b"date", b"x-request-id", b"access-control-allow-origin"}


def request_head(
    target: bytes, headers: Headers, host: bytes, body_bytes: int, *, without: Collection[bytes], more: bytes
) -> bytes:
    """`without` is `NOT_SENT_ON` at least; `more`: whole header lines."""
    parts = [b"POST ", target, b" HTTP/1.1\r\nhost: ", host]
    named = _named_by_connection(headers)
    for name, value in headers:
        if name not in without and not name.startswith(OURS) and name not in named:
            parts += (b"\r\n", name, b": ", value)
    parts.append(b"\r\ncontent-length: %d\r\n%b\r\n" % (body_bytes, more))
    return b"".join(parts)


def answer_headers(headers: Headers, *, whole_bytes: int | None) -> Headers:
    """`whole_bytes`: of a body that is known to its end, whether or not the replica said so."""
    kept = [(name, value) for name, value in headers if name not in NOT_SENT_BACK]
    if whole_bytes is not None and not any(name == b"content-length" for name, _ in kept):
        kept.append((b"content-length", b"%d" % whole_bytes))
    return kept


def value_of(headers: Headers, name: bytes) -> bytes:
    """Of the first header of that name; empty where there is none."""
    for found, value in headers:
        if found == name:
            return value
    return b""


def _named_by_connection(headers: Headers) -> Collection[bytes]:
    value = value_of(headers, b"connection").lower()
    return () if value in (b"", b"keep-alive", b"close") else {name.strip() for name in value.split(b",")}
