"""`RequestFraming` splits the bytes of a connection into requests. It corrects how uvicorn uses the parser llhttp.

- The parser stops after the head of a request that asks for another protocol (`Upgrade`), and uvicorn would parse the
  body as the next request. Here a second parser gets the head without the `Upgrade`, and then the rest: the request is
  served as HTTP/1.1 with its body (RFC 9110, 7.8). `CONNECT` gets a 405, and the connection ends.
- Trailers are dropped: they never become headers. Trailers and heads beyond a limit are refused (431), and parsing
  stops at the first header too many, as each one takes much more memory than its bytes.
- No response is written into another one: an invalid request is refused in its turn, and the connection ends.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo_server.http.body import discard_body
from octavo_server.json_responses import error_head, send_error
from octavo_server.openai.errors import ApiError

logger = logging.getLogger(__name__)

#: Limits for URL and headers together, and for the trailers.
MAX_HEAD_BYTES = MAX_TRAILER_BYTES = 32 * 1024
MAX_HEADERS = 128
HEAD_TOO_LARGE = f"The URL and headers are larger than {MAX_HEAD_BYTES} bytes, the limit: send fewer or shorter ones."
TOO_MANY_HEADERS = f"The request has more than {MAX_HEADERS} headers, the limit: send fewer."
TRAILERS_TOO_LARGE = (
    f"The trailers are larger than {MAX_TRAILER_BYTES} bytes, the limit: send none, as they are unused."
)
_HEAD_REFUSAL = ApiError(431, "RequestTooLargeError", HEAD_TOO_LARGE)
_HEADERS_REFUSAL = ApiError(431, "RequestTooLargeError", TOO_MANY_HEADERS)
_TRAILER_REFUSAL = ApiError(431, "RequestTooLargeError", TRAILERS_TOO_LARGE)
_BAD_REQUEST = ApiError(400, "Bad Request", "The request is not valid HTTP/1.1: send it with a standard HTTP client.")
_NO_TUNNEL = ApiError(405, "Method Not Allowed", "CONNECT is for proxies, and this server is none: send POST or GET.")

CLOSE = (b"connection", b"close")
#: Headers and `Connection` options that ask for another protocol.
UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})


class _TooManyHeaders(Exception):
    pass


class _TrailersTooLarge(Exception):
    pass


class RequestFraming(HttpToolsProtocol):
    """Subclasses override `begin_request` and `end_request`, which see each request once, in place of the parser's
    `on_headers_complete` and `on_message_complete`."""

    on_refused_head: ClassVar[Callable[[str], None]]

    _is_in_head = False
    _is_in_body = False
    _ignores_input = False
    _head_bytes = 0
    _read_bytes = 0  # size of the data being parsed, which may hold a whole head
    _trailer_bytes = 0
    _chunk: int | None = None  # number of a chunk without data so far; the last chunk keeps it while trailers arrive
    _num_chunks = 0

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._ignores_input:
            return
        self._read_bytes = len(data)
        chunk = self._chunk
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse_unparsed(error.__context__)
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head(_HEAD_REFUSAL)
        elif chunk is not None and chunk == self._chunk:
            self._trailer_bytes += len(data)
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                self._refuse(_TRAILER_REFUSAL)

    def _feed(self, data: bytes) -> None:
        rest: Any = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._ignores_input:
                    return
                (offset,) = upgrade.args
                rest = memoryview(rest)[offset:]
                self._feed_plain_head()

    def _feed_plain_head(self) -> None:
        """Feed a new parser the head that was just read, without its headers that ask for another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        lines += [b"%s: %s" % header for header in without_upgrade(self.headers)]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._is_in_body = True, False
        self._head_bytes = self._trailer_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            if len(self.headers) == MAX_HEADERS:
                raise _TooManyHeaders
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value)
        if self._trailer_bytes > MAX_TRAILER_BYTES:
            raise _TrailersTooLarge

    def on_headers_complete(self) -> None:
        if self._is_head_too_large():
            self._refuse_in_turn(_HEAD_REFUSAL)
            self._report_refused_head()
        elif self.parser.get_method() == b"CONNECT":
            self._refuse_in_turn(_NO_TUNNEL)
        elif self.parser.should_upgrade():
            return
        self._is_in_head, self._is_in_body = False, True
        self.begin_request()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        self._chunk = self._num_chunks

    def on_body(self, body: bytes) -> None:
        self._chunk = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_in_body:  # False at the end of a head that is parsed again without its upgrade
            self._chunk, self._is_in_body = None, False
            self.end_request()

    def begin_request(self) -> None:
        super().on_headers_complete()

    def end_request(self) -> None:
        super().on_message_complete()

    def _is_head_too_large(self) -> bool:
        return self._head_bytes + self._read_bytes > MAX_HEAD_BYTES and _size(self.url, self.headers) > MAX_HEAD_BYTES

    def _refuse_in_turn(self, error: ApiError) -> None:
        """Refuse the request after the responses to earlier requests of the connection.

        Bytes behind a request for another protocol or a tunnel are no request, so they are ignored.
        """
        self.app, self.url, self._ignores_input = _refusing(error), b"/", self.parser.should_upgrade()

    def _refuse_unparsed(self, cause: BaseException | None) -> None:
        if isinstance(cause, _TooManyHeaders):
            self._refuse_head(_HEADERS_REFUSAL)
        else:
            self._refuse(_TRAILER_REFUSAL if isinstance(cause, _TrailersTooLarge) else _BAD_REQUEST)

    def _refuse_head(self, error: ApiError) -> None:
        self._refuse(error)
        self._report_refused_head()

    def _refuse(self, error: ApiError) -> None:
        """Send an error response, unless the client would match it with another request, and end the connection."""
        logger.debug("%s: the request was refused with %d: %s", self.client, error.status, error.message)
        self._ignores_input = True
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete
        if self._is_in_body:
            if not self.pipeline and not cycle.response_started:
                cycle.disconnected = cycle.response_complete = True
                cycle.message_event.set()
                self._write_refusal(error)
            self.transport.close()
        elif is_idle:
            self._write_refusal(error)
            self.transport.close()
        else:
            cycle.keep_alive = False

    def _write_refusal(self, error: ApiError) -> None:
        body = error.body()
        lines = [b"%s: %s\r\n" % header for header in (*error_head(error, body), CLOSE)]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))

    def _report_refused_head(self) -> None:
        type(self).on_refused_head(self.parser.get_method().decode("ascii"))


def without_upgrade(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    plain = []
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() not in UPGRADE_HEADERS)
            if not value:
                continue
        if name not in UPGRADE_HEADERS:
            plain.append((name, value))
    return plain


def _size(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) + len(": \r\n") for name, value in headers)


def _refusing(error: ApiError) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await discard_body(receive)
        await send_error(send, replace(error, headers={"connection": "close"}))

    return refuse
