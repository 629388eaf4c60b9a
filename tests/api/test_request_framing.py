"""The bytes of a connection that are a request: `Upgrade`, `CONNECT`, trailers and bad requests, at a real server."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager

import httptools
import pytest
import uvicorn
from octavo_server.config import BodyLimits, HttpSettings
from octavo_server.http.request_framing import MAX_TRAILER_BYTES, without_upgrade
from octavo_server.http.timeout_protocol import timeout_protocol
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
BEHIND = b"GET /behind HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Echo:
    """Responds 200 with path and body of each request, and stores the headers. `answers_first`: without reading."""

    def __init__(self):
        self.seen = []
        self.answers_first = False
        self.resumed = asyncio.Event()

    async def __call__(self, scope, receive, send):
        body, more = b"", not self.answers_first
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.seen.append((scope["path"], None, dict(scope["headers"])))
                return
            body += message["body"]
            more = message["more_body"]
        self.seen.append((scope["path"], body, dict(scope["headers"])))
        content = scope["path"].encode() + b"|" + body
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/held":
            await self.resumed.wait()
        await send({"type": "http.response.body", "body": content})


class Connection:
    def __init__(self, app, server, reader, writer):
        self.app = app
        self.server = server
        self.reader = reader
        self.writer = writer

    async def send(self, *segments):
        """Send each piece in a segment of its own: the server parses it before the next one is sent."""
        for segment in segments:
            (protocol,) = self.server.server_state.connections
            received = protocol.data_received
            parsed = asyncio.Event()

            def data_received(data, received=received, parsed=parsed):
                received(data)
                parsed.set()

            protocol.data_received = data_received
            self.writer.write(segment)
            await parsed.wait()
            protocol.data_received = received

    async def answers(self):
        """(status, body) of each response, until the server closes the connection."""
        data = await self.reader.read()
        found = []
        while data:
            head, _, data = data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            found.append((int(head.split()[1]), data[:length]))
            data = data[length:]
        return found


@asynccontextmanager
async def connected():
    app, refused = Echo(), []
    limits = BodyLimits(request_timeout=10.0)
    http = timeout_protocol(HttpSettings(limits=limits, slow_client_timeout=10.0, max_connections=10), refused.append)
    server = uvicorn.Server(uvicorn.Config(app, http=http, ws="none", lifespan="off", log_config=None))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    running = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    while not server.server_state.connections:
        await asyncio.sleep(0)
    try:
        yield Connection(app, server, reader, writer)
    finally:
        writer.close()
        server.should_exit = True
        await running


def post(path, body, *, more=b"", is_chunked=False):
    if is_chunked:
        more, body = more + b"Transfer-Encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        more += b"Content-Length: %d\r\n" % len(body)
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path, more), body


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("split", ["together", "apart", "head in two"])
async def test_a_request_with_upgrade_is_served_with_its_body(is_chunked, split):
    head, body = post(b"/a", SMUGGLED, more=UPGRADE, is_chunked=is_chunked)
    segments = {
        "together": [head + body + BEHIND],
        "apart": [head, body, BEHIND],
        "head in two": [head[:30], head[30:] + body[:5], body[5:] + BEHIND],
    }[split]
    async with connected() as connection:
        await connection.send(*segments)
        assert await connection.answers() == [(200, b"/a|" + SMUGGLED), (200, b"/behind|")]
        path, _, headers = connection.app.seen[0]
        assert path == "/a"
        assert not {b"upgrade", b"connection", b"http2-settings"} & set(headers)


async def test_many_requests_with_upgrade_in_one_segment_are_all_served():
    head, body = post(b"/a", b"x", more=UPGRADE)
    async with connected() as connection:
        await connection.send((head + body) * 100 + BEHIND)
        assert await connection.answers() == [(200, b"/a|x")] * 100 + [(200, b"/behind|")]


async def test_a_pipelined_upgrade_keeps_connection_close():
    first, last = post(b"/a", b"1"), post(b"/b", b"2", more=b"Connection: upgrade, close\r\nUpgrade: websocket\r\n")
    async with connected() as connection:
        await connection.send(b"".join((*first, *last)))
        assert await connection.answers() == [(200, b"/a|1"), (200, b"/b|2")]


def test_only_upgrade_headers_are_removed_from_the_head():
    headers = [(b"connection", b"Upgrade , keep-alive"), (b"connection", b"upgrade"), (b"upgrade", b"x"), (b"a", b"b")]
    assert without_upgrade(headers) == [(b"connection", b"keep-alive"), (b"a", b"b")]


async def test_connect_is_refused_in_its_turn_and_bytes_behind_it_are_ignored():
    head = b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
    async with connected() as connection:
        await connection.send(b"GET /held HTTP/1.1\r\n\r\n" + head + SMUGGLED, SMUGGLED)
        connection.app.resumed.set()
        assert [status for status, _ in await connection.answers()] == [200, 405]
        assert [path for path, _, _ in connection.app.seen] == ["/held"]


async def test_trailers_are_dropped():
    head, body = post(b"/a", b"1", is_chunked=True)
    async with connected() as connection:
        await connection.send(head + body[:-2] + b"x-evil: 1\r\nauthorization: Bearer other\r\n\r\n" + BEHIND)
        assert await connection.answers() == [(200, b"/a|1"), (200, b"/behind|")]
        assert {name for _, _, headers in connection.app.seen for name in headers} <= {
            *(b"host", b"transfer-encoding", b"connection")
        }


@pytest.mark.parametrize("piece", [b"a: b\r\n" * 1000, b"x" * 6000], ids=["many", "one endless"])
async def test_endless_trailers_are_refused(piece):
    head, body = post(b"/a", b"1", is_chunked=True)
    async with connected() as connection:
        await connection.send(head + body[:-2])
        num_sent = 0
        while num_sent <= MAX_TRAILER_BYTES + len(piece):
            await connection.send(piece)
            num_sent += len(piece)
            if not connection.server.server_state.connections:
                break
            (protocol,) = connection.server.server_state.connections
            if protocol.transport.is_closing():
                break
        ((status, _),) = await connection.answers()
        assert status == 431
        assert num_sent <= MAX_TRAILER_BYTES + 2 * len(piece)
        assert [body for _, body, _ in connection.app.seen] == [None]


async def test_large_bodies_in_small_chunks_do_not_count_as_trailers():
    chunk = b"%x\r\n%s\r\n" % (1000, b"x" * 1000)
    async with connected() as connection:
        await connection.send(b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        whole = chunk * 200 + b"0\r\n\r\n"
        await connection.send(*(whole[at : at + 3003] for at in range(0, len(whole), 3003)))
        assert await connection.answers() == [(200, b"/a|" + b"x" * 200_000)]


async def test_a_body_that_turns_invalid_gets_no_second_response():
    async with connected() as connection:
        connection.app.answers_first = True
        head, _ = post(b"/a", b"1", is_chunked=True)
        await connection.send(head, b"no chunk\r\n")
        assert await connection.answers() == [(200, b"/a|")]


async def test_a_response_before_the_end_of_the_body_ends_the_connection():
    async with connected() as connection:
        connection.app.answers_first = True
        head, _ = post(b"/a", b"x" * 100)
        await connection.send(head + b"x")
        assert b"connection: close" in await connection.reader.readuntil(b"\r\n\r\n")
        (protocol,) = connection.server.server_state.connections
        assert await connection.reader.read() == b"/a|"
        await connection.send(b"x" * 99 + BEHIND)
        assert len(connection.app.seen) == 1
        assert connection.server.server_state.connections == {protocol}, "unread bytes would reset the connection"
        connection.writer.close()
        while connection.server.server_state.connections:
            await asyncio.sleep(0)


async def test_the_refusal_of_an_invalid_body_is_not_reset():
    async with connected() as connection:
        head, _ = post(b"/a", b"1", is_chunked=True)
        await connection.send(head, b"no chunk\r\n")
        assert [status for status, _ in await connection.answers()] == [400]
        assert connection.server.server_state.connections


async def test_a_body_that_never_comes_does_not_keep_an_answered_connection_open(monkeypatch):
    monkeypatch.setattr("octavo_server.http.timeout_protocol.LINGER_S", 0.0)
    async with connected() as connection:
        connection.app.answers_first = True
        await connection.send(post(b"/a", b"x" * 100)[0])
        while connection.server.server_state.connections:
            await asyncio.sleep(0)
        assert b"connection: close" in await connection.reader.read()


async def test_a_response_after_the_body_leaves_the_connection_open():
    async with connected() as connection:
        head, body = post(b"/a", b"x" * 100)
        await connection.send(head, body[:50], body[50:])
        assert b"connection: close" not in await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send(BEHIND)
        assert (await connection.reader.read()).endswith(b"/behind|")


@pytest.mark.parametrize("num_sent", [1, 50])
async def test_a_request_in_progress_at_a_shutdown_ends_the_connection(num_sent):
    async with connected() as connection:
        head, body = post(b"/held", b"x" * 100)
        await connection.send(head + body[:num_sent])
        (protocol,) = connection.server.server_state.connections
        protocol.shutdown()
        await connection.send(body[num_sent:])
        connection.app.resumed.set()
        assert b"connection: close" in await connection.reader.readuntil(b"\r\n\r\n")
        assert await connection.reader.read() == b"/held|" + body


async def test_a_bad_request_waits_for_the_response_before_it():
    async with connected() as connection:
        await connection.send(b"GET /held HTTP/1.1\r\n\r\nNO HTTP\r\n\r\n")
        connection.app.resumed.set()
        assert await connection.answers() == [(200, b"/held|")]


async def test_bad_requests_are_refused_without_log_lines(caplog):
    with caplog.at_level(logging.INFO):
        async with connected() as connection:
            await connection.send(b"NO HTTP\r\n\r\n")
            ((status, body),) = await connection.answers()
    assert status == 400
    assert b'"code":400' in body
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


PROTOCOL = {
    *("cycle", "pipeline", "flow", "timeout_keep_alive_task", "timeout_keep_alive", "headers", "url", "scope", "app"),
    *("parser", "transport", "client", "loop"),
}
CYCLE = {
    *("chunked_encoding", "expected_content_length", "response_started", "response_complete", "disconnected"),
    *("keep_alive", "message_event", "scope", "transport"),
}


async def test_uvicorn_has_each_private_name_in_use():
    """A new version of uvicorn, which `server/pyproject.toml` bounds, must pass all tests of this file."""
    config = uvicorn.Config(Echo(), ws="none", log_config=None)
    made = httptools_impl.HttpToolsProtocol(config, uvicorn.server.ServerState(), {})
    made.on_message_begin()
    assert set(vars(made)) >= PROTOCOL
    methods = {"_unset_keepalive_if_required", "_start_asgi_task", "on_response_complete", "on_header", "on_body"}
    methods |= {"on_message_begin", "on_headers_complete", "on_message_complete", "connection_made", "connection_lost"}
    methods |= {"data_received", "pause_writing", "resume_writing", "shutdown"}
    assert methods <= set(vars(httptools_impl.HttpToolsProtocol))
    assert {"resume_reading", "pause_reading", "read_paused"} <= set(dir(FlowControl(None)))
    code = httptools_impl.RequestResponseCycle.__init__.__code__
    assert set(code.co_names) | set(code.co_varnames) >= CYCLE
    assert httptools_impl.STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")
    assert issubclass(httptools.HttpParserCallbackError, httptools.HttpParserError)
    assert not issubclass(httptools.HttpParserUpgrade, httptools.HttpParserError)
