"""`FileServer`: files over HTTP on the loopback, with ranges and ETags; the base of the tests' model servers.

A test can inject faults: a status instead of the file, a response that is cut off, or one held until it is released.
"""

import hashlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote

RELEASE_TIMEOUT_S = 60


class FileServer:
    """`handler_class` makes the responses. `requests` lists the method, path and any range of each request."""

    handler_class: ClassVar[type["Handler"]]

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.statuses: dict[str, list[int]] = {}  # end of a path -> statuses of its next responses
        self.cut_after: dict[str, list[int]] = {}  # end of a path -> bytes after which its next responses are cut off
        self.replace_on_cut: dict[str, bytes] = {}  # path -> new content after a response was cut off
        self.held: dict[str, int] = {}  # end of a path -> bytes after which its responses wait for `released`
        self.released = threading.Event()
        self.reached = threading.Event()
        self.tls: ssl.SSLContext | None = None  # the server speaks HTTPS if this is set

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yield the address of the server."""
        handler = type("BoundHandler", (self.handler_class,), {"site": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            if self.tls:
                server.socket = self.tls.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                self.released.set()
                server.shutdown()
                thread.join()

    def asked(self, end: str) -> list[str]:
        return [request for request in self.requests if request.split()[1].endswith(end)]


def e_tag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Any

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def answer(self) -> None:
        raise NotImplementedError

    def _serve(self) -> None:
        wanted = self.headers.get("Range", "")
        path = unquote(self.path.partition("?")[0])
        self.site.requests.append(f"{self.command} {path} {wanted}".strip())
        for end, statuses in self.site.statuses.items():
            if path.endswith(end) and statuses:
                self.send_whole(statuses.pop(0), b"")
                return
        with suppress(ConnectionError):  # the client was killed
            self.answer()

    def send_whole(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status, HTTPStatus(status).phrase)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, content: bytes, **headers: str) -> None:
        begin, end = _range(self.headers.get("Range"), len(content))
        self.send_response(206 if "Range" in self.headers else 200)
        for name, value in {"ETag": e_tag(content), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(content[begin:end])

    def _send_body(self, body: bytes) -> None:
        path, site = unquote(self.path.partition("?")[0]), self.site
        for end, after in site.held.items():
            if path.endswith(end):
                self.wfile.write(body[:after])
                self.wfile.flush()
                site.reached.set()
                site.released.wait(RELEASE_TIMEOUT_S)
                body = body[after:]
        for end, cuts in site.cut_after.items():
            if path.endswith(end) and cuts:
                self.wfile.write(body[: cuts.pop(0)])
                self.close_connection = True
                site.files |= site.replace_on_cut
                return
        self.wfile.write(body)


def _range(header: str | None, total: int) -> tuple[int, int]:
    if header is None:
        return 0, total
    begin, _, last = header.removeprefix("bytes=").partition("-")
    return int(begin), min(total, int(last) + 1) if last else total
