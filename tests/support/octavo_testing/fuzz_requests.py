"""Random HTTP requests that no client should send, as bytes; the same seed gives the same requests.

Paths, methods and field names come from the server's own OpenAPI document, so that new endpoints are fuzzed, too.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from octavo_testing.fuzz_values import EXTRA_FIELDS, PLAUSIBLE, TEXTS, broken_json, nasty, value_for

LONG_RUN = 2000
#: Endpoints that would end the server.
SPARED = frozenset({"/drain"})
#: Endpoints whose response ends only when the client disconnects.
ENDLESS = frozenset({"/kv/events"})
VALID: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "abc", "max_tokens": 4},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "tokens": {"tokens": [65, 66]},
    "input": {"input": "hi", "max_output_tokens": 4},
}
ODD_HEADERS = (
    *(b"Authorization: Bearer \xff", b"Authorization: Basic", b"X-Request-Id: \xe9\x01", b"X-data-parallel-rank: junk"),
    *(b"Accept-Encoding: gzip, br, x", b"Cookie: a=\x80", b"Origin: null", b"traceparent: 00-zz-1-1", b"Expect: x"),
    *(b"X-Long: " + b"a" * 20_000, b"Range: bytes=0-1", b"If-None-Match: *", b"Content-Encoding: gzip", b"No-Colon"),
    *(b"Upgrade: websocket", b"Host: [::1", b"Forwarded: for=" + b"[" * 99, b": empty", b"X-Request-Id: " + b"i" * 300),
)
CONTENT_TYPES = (
    *(b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"application/xml"),
    *(b"application/json; charset=utf-16", b"", b"/", b"application/json, application/json", b"\xff"),
)
Leaving = Literal["never", "within the body", "before the answer", "within the answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzRequest:
    kind: str
    path: str
    payload: bytes
    leaves: Leaving = "never"

    @property
    def is_cut_off(self) -> bool:
        """The server may close the connection without a response, because the framing need not be valid HTTP."""
        return self.kind == "odd framing"


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    fields: tuple[str, ...]
    valid: dict[str, Any]


def operations(document: Mapping[str, Any]) -> list[Operation]:
    found = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            if path not in SPARED:
                fields = tuple(_field_names(document, described))
                required = [name for name in VALID if name in fields]
                found.append(Operation(method.upper(), path, fields, VALID[required[0]] if required else {}))
    return found


def _field_names(document: Mapping[str, Any], described: Mapping[str, Any]) -> Iterator[str]:
    for content in described.get("requestBody", {}).get("content", {}).values():
        name = content["schema"]["$ref"].rsplit("/", 1)[1]
        yield from document["components"]["schemas"][name].get("properties", ())  # a union has none of its own
        yield from EXTRA_FIELDS


class Fuzzer:
    """Generates the same `requests` for the same seed and document. They begin with each value of `PLAUSIBLE`.

    A long run begins with three rounds of them: the memory of costly requests is then allocated early, so that later
    growth is a leak.
    """

    def __init__(self, document: Mapping[str, Any], seed: int) -> None:
        self._dice = random.Random(seed)
        self._operations = operations(document)
        self._with_body = [operation for operation in self._operations if operation.fields]
        known = {name for operation in self._with_body for name in operation.fields}
        self._plausible = [(name, value) for name in PLAUSIBLE if name in known for value in PLAUSIBLE[name]]

    def requests(self, count: int) -> Iterator[FuzzRequest]:
        kinds: dict[Callable[[], FuzzRequest], int] = {
            self._valid: 15, self._wrong_fields: 40, self._broken_body: 18, self._odd_head: 9, self._odd_framing: 8,
            self._odd_route: 5, self._leaving: 5,
        }  # fmt: skip
        first = self._plausible * (3 if count > LONG_RUN else 1)
        yield from itertools.islice(self._each_of(first), count)
        for _ in range(count - len(first)):
            yield self._dice.choices([*kinds], [*kinds.values()])[0]()

    def _each_of(self, plausible: list[tuple[str, Any]]) -> Iterator[FuzzRequest]:
        for name, value in plausible:
            operation = self._dice.choice([o for o in self._with_body if name in o.fields])
            yield self._request("plausible", operation, self._dump({**operation.valid, name: value}))

    def _valid(self) -> FuzzRequest:
        operation = self._dice.choice(self._operations)
        streams = {"stream": True} if "stream" in operation.fields and self._dice.random() < 0.5 else {}
        return self._request("valid", operation, self._dump({**operation.valid, **streams}))

    def _wrong_fields(self) -> FuzzRequest:
        operation = self._dice.choice(self._with_body)
        return self._request("wrong fields", operation, self._dump(self._mutated(operation)))

    def _mutated(self, operation: Operation) -> dict[str, Any]:
        names = self._dice.sample(operation.fields, min(self._dice.choice((1, 1, 1, 2, 3, 8)), len(operation.fields)))
        body = {**operation.valid, **{name: value_for(self._dice, name) for name in names}}
        if self._dice.random() < 0.05:
            body[self._dice.choice(TEXTS)] = nasty(self._dice)
        if self._dice.random() < 0.05:
            body.pop(self._dice.choice([*body]))
        return body

    def _broken_body(self) -> FuzzRequest:
        operation = self._dice.choice(self._with_body)
        return self._request("broken body", operation, broken_json(self._dice, operation.valid))

    def _odd_head(self) -> FuzzRequest:
        operation = self._dice.choice(self._operations)
        headers = self._dice.sample(ODD_HEADERS, self._dice.randint(1, 3))
        kind = b"Content-Type: " + self._dice.choice((b"application/json", *CONTENT_TYPES))
        return self._request("odd head", operation, self._dump(operation.valid), headers=[*headers, kind])

    def _odd_framing(self) -> FuzzRequest:
        operation = self._dice.choice(self._with_body)
        body = self._dump(operation.valid)
        chunks = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
        head = _head(operation.method, operation.path)
        chunked = head + b"Transfer-Encoding: chunked\r\n"
        payloads = (
            chunked + b"\r\n" + chunks + b"0\r\n\r\n",
            chunked + b"\r\n" + chunks + b"0\r\nTrailer: x\r\n\r\n",
            chunked + b"\r\nzz\r\n" + body,
            chunked + b"\r\nffffffffffffffffff\r\n" + body,
            chunked + b"\r\n-1\r\n" + body,
            chunked + b"Content-Length: 5\r\n\r\n" + chunks + b"0\r\n\r\n",
            head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + body,
            head + b"Content-Length: -1\r\n\r\n" + body,
            head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
            head + b"Content-Length: " + str(len(body) - 1).encode() + b"\r\n\r\n" + body,
            head + b"\r\n" + body,
            head.replace(b"\r\n", b"\n") + b"\n" + body,
            b"\x16\x03\x01\x02\x00" + self._dice.randbytes(200),
            self._dice.randbytes(self._dice.choice((1, 50, 3000))) + b"\r\n\r\n",
        )
        return FuzzRequest(kind="odd framing", path=operation.path, payload=self._dice.choice(payloads))

    def _odd_route(self) -> FuzzRequest:
        method = self._dice.choice(("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "POST", "BREW"))
        known = [operation.path for operation in self._operations if operation.path not in ENDLESS]
        text = quote(self._dice.choice(TEXTS).encode("utf-8", "surrogatepass"))
        paths = (*known, *("/" + text, "/v1/models/" + text, "//", "/v1/../metrics", "/%00", "/%ff", "/?" + text, "*"))
        path = self._dice.choice(paths)
        if path in SPARED:
            method = "GET"
        body = self._dump(nasty(self._dice))
        length = b"Content-Length: " + str(len(body)).encode()
        return FuzzRequest(kind="odd route", path=path, payload=_head(method, path) + length + b"\r\n\r\n" + body)

    def _leaving(self) -> FuzzRequest:
        operation = self._dice.choice(self._with_body)
        stream = {"stream": True} if "stream" in operation.fields else {}
        body = self._dump({**operation.valid, **stream, "max_tokens": 60, "ignore_eos": True})
        leaves = self._dice.choice(("within the body", "before the answer", "within the answer"))
        request = self._request("leaving", operation, body, leaves=leaves)
        if leaves != "within the body":
            return request
        kept = len(request.payload) - self._dice.randint(1, len(body))
        return FuzzRequest(kind="leaving", path=operation.path, payload=request.payload[:kept], leaves=leaves)

    def _request(
        self,
        kind: str,
        operation: Operation,
        body: bytes,
        *,
        headers: list[bytes] | None = None,
        leaves: Leaving = "never",
    ) -> FuzzRequest:
        lines = headers or [b"Content-Type: application/json"]
        leaves = "within the answer" if operation.path in ENDLESS else leaves
        length = b"Content-Length: " + str(len(body)).encode()
        head = _head(operation.method, operation.path) + b"".join(line + b"\r\n" for line in [*lines, length]) + b"\r\n"
        return FuzzRequest(kind=kind, path=operation.path, payload=head + body, leaves=leaves)

    def _dump(self, body: Any) -> bytes:
        return json.dumps(body, ensure_ascii=self._dice.random() < 0.8).encode("utf-8", "surrogatepass")


def _head(method: str, path: str) -> bytes:
    return f"{method} {path.replace('{model}', 'tiny')} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
