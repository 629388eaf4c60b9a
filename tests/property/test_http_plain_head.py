"""What `PlainHeads` reads, llhttp reads alike: as a request that is whole with its body, on a connection that stays."""

import httptools
from hypothesis import example, given
from hypothesis import strategies as st
from octavo_server.http.plain_head import MAX_KNOWN, MAX_PLAIN_BYTES, PlainHeads

PATH = b"/v1/chat/completions"
NAMES = [
    *(b"Host", b"content-length", b"Content-Length", b"Connection", b"Transfer-Encoding", b"Expect", b"Upgrade"),
    *(b"Proxy-Connection", b"X-Request-Id", b"x-odd!#$%&'*+.^_`|~", b"", b"a b", b"a\x00", b"\xff"),
]
VALUES = [
    *(b"5", b"05", b"+5", b"5, 5", b"0x5", b"-1", b"", b"99999999999999999999"),
    *(b"keep-alive", b"Keep-Alive", b"close", b"upgrade", b"chunked", b"identity", b"100-continue", b"websocket"),
    *(b"x" * 300, b"a\tb", b"\xe9", b"a\x00b", b"a\nb", b"a\rb", b"a\r\n b"),
]
PADDING = st.sampled_from([b"", b" ", b"\t", b"  "])
FIELDS = st.tuples(st.sampled_from(NAMES), PADDING, st.sampled_from(VALUES) | st.binary(max_size=8), PADDING)
START = b"POST " + PATH + b" HTTP/1.1"
OTHER_STARTS = [
    *(b"POST /other HTTP/1.1", b"GET " + PATH + b" HTTP/1.1", b"POST " + PATH + b" HTTP/1.0", b"\r\n" + START),
    *(b"POST  " + PATH + b" HTTP/1.1", b"post " + PATH + b" HTTP/1.1", b"POST " + PATH + b"?a=1 HTTP/1.1"),
]
STARTS = st.just(START) | st.just(START) | st.sampled_from(OTHER_STARTS)
USUAL = ((b"Host", b" ", b"x", b""), (b"Content-Length", b" ", b"5", b""))


class Parsed:
    def __init__(self, data):
        self.url, self.headers, self.body, self.is_complete = b"", [], b"", False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url):
        self.url += url

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.is_complete = True


def written(start, fields):
    lines = [name + b":" + before + value + after for name, before, value, after in fields]
    return b"\r\n".join((start, *lines, b"", b""))


@given(start=STARTS, fields=st.lists(FIELDS, max_size=4), has_length=st.booleans())
@example(start=START, fields=[], has_length=True)
def test_what_is_read_is_what_llhttp_reads(start, fields, has_length):
    data = written(start, [*fields, *(USUAL if has_length else ())])
    heads = PlainHeads(frozenset({PATH}))
    head = heads.read(data[: heads.begins(data)])
    if head is None:
        return
    assert heads.begins(data) == len(data)
    body = b"x" * head.body_bytes
    parsed = Parsed(data + body)
    assert (parsed.url, parsed.headers, parsed.body, parsed.is_complete) == (head.path, head.headers, body, True)
    assert parsed.parser.get_method() == b"POST"
    assert parsed.parser.get_http_version() == "1.1"
    assert parsed.parser.should_keep_alive()
    assert not parsed.parser.should_upgrade()


def test_the_usual_is_read():
    heads = PlainHeads(frozenset({PATH}))
    data = written(START, [*USUAL, (b"Connection", b" ", b"keep-alive", b"")])
    head = heads.read(data[: heads.begins(data + b"hello")])
    assert head is not None
    assert head.headers == [(b"host", b"x"), (b"content-length", b"5"), (b"connection", b"keep-alive")]
    assert heads.read(data) is head
    assert heads.begins(data[:-1]) == 0
    assert heads.begins(written(START, [(b"A", b"", b"x" * MAX_PLAIN_BYTES, b""), *USUAL])) == 0


def test_of_endlessly_many_heads_the_last_are_known():
    heads = PlainHeads(frozenset({PATH}))
    many = [written(START, [*USUAL, (b"N", b"", b"%d" % n, b"")]) for n in range(3 * MAX_KNOWN)]
    for data in many:
        assert heads.read(data) is not None
    assert len(heads._known) <= MAX_KNOWN
    assert heads.read(many[-1]) is heads.read(many[-1])
