"""Filters request and response headers on their way through the router.

Hop-by-hop headers (RFC 9110 §7.6.1), including those that a `Connection` header names, are not forwarded. Requests lose
`x-octavo-*` too, as only a router may set these headers. All other headers pass through unchanged.
"""

from collections.abc import Collection

Headers = list[tuple[bytes, bytes]]

OWN_PREFIX = b"x-octavo-"
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"}
)
#: Request headers that aren't forwarded: the router frames the body and sets the request id itself.
NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
#: Response headers that aren't returned: uvicorn sets the date; the router decides which pages may read a response.
NOT_RETURNED = _HOP_BY_HOP | {b"date", b"x-request-id", b"request-id", b"access-control-allow-origin"}
#: Responses with these status codes have no body and no content-length (RFC 9110 §8.6).
BODYLESS = frozenset({204, 304})


def request_head(
    target: bytes, headers: Headers, host: bytes, body_bytes: int, *, without: Collection[bytes], extra: bytes
) -> bytes:
    """Encode the head of a POST request. `without`: headers to drop, at least `NOT_FORWARDED`. `extra`: added lines."""
    parts = [b"POST ", target, b" HTTP/1.1\r\nhost: ", host]
    named = named_by_connection(headers)
    for name, value in headers:
        if name not in without and not name.startswith(OWN_PREFIX) and name not in named:
            parts += (b"\r\n", name, b": ", value)
    parts.append(b"\r\ncontent-length: %d\r\n%b\r\n" % (body_bytes, extra))
    return b"".join(parts)


def response_headers(status: int, headers: Headers, *, whole_bytes: int | None, keeps_own: bool) -> Headers:
    """Headers to return. `whole_bytes`: length of a complete body. `keeps_own`: keep the replica's `x-octavo-*`."""
    named = named_by_connection(headers)
    kept = [
        (name, value)
        for name, value in headers
        if name not in NOT_RETURNED and name not in named and (keeps_own or not name.startswith(OWN_PREFIX))
    ]
    if status in BODYLESS:
        return [(name, value) for name, value in kept if name != b"content-length"]
    if whole_bytes is not None and not any(name == b"content-length" for name, _ in kept):
        kept.append((b"content-length", b"%d" % whole_bytes))
    return kept


def value_of(headers: Headers, name: bytes) -> bytes:
    """Value of the first header of that name; empty without one."""
    for header, value in headers:
        if header == name:
            return value
    return b""


def named_by_connection(headers: Headers) -> Collection[bytes]:
    values = [value.lower() for name, value in headers if name == b"connection"]
    if not values or values in ([b"keep-alive"], [b"close"]):
        return ()
    return {name.strip() for value in values for name in value.split(b",")}
