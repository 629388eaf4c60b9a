"""An event stream received in any pieces is sent on byte for byte in complete frames."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from octavo_server.openai.errors import ReplicaLost
from octavo_server.router.proxy.sse import SSEFramer

LINES = st.lists(st.sampled_from([b"data: {}", b"event: x", b": hm", b"data: \xc3\xa9", b"id: 1"]), min_size=1)
NEWLINES = st.sampled_from([b"\n", b"\r\n"])


@st.composite
def streams(draw):
    newline = draw(NEWLINES)
    frames = draw(st.lists(LINES, min_size=1, max_size=5))
    return b"".join(newline.join(lines) + newline * 2 for lines in frames)


def cut(data, places):
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def is_whole(data):
    return data == b"" or data.endswith((b"\n\n", b"\r\n\r\n"))


@given(stream=streams(), places=st.lists(st.integers(0, 500)), tail=st.sampled_from([b"", b"data: {", b"data: x\n"]))
def test_bytes_are_unchanged_and_frames_are_complete(stream, places, tail):
    framer, out = SSEFramer(), b""
    for piece in cut(stream + tail, places):
        out += framer.feed(piece)
        assert is_whole(out)
        assert (stream + tail).startswith(out)
    assert out == stream
    assert out + framer.rest() == stream + tail


@given(stream=streams(), places=st.lists(st.integers(0, 500)))
def test_only_a_final_event_ends_the_stream(stream, places):
    framer = SSEFramer()
    for piece in cut(stream, places):
        framer.feed(piece)
    assert not framer.has_ended
    framer.feed(b"data: [DONE]\n\n")
    assert framer.has_ended


def test_an_error_event_has_the_dialect_of_its_stream():
    framer, error = SSEFramer("events"), ReplicaLost("it broke")
    framer.feed(b'event: response.created\ndata: {"sequence_number":7}\n\n')
    assert SSEFramer("chunks").failure(error).endswith(b'"code":502}}\n\ndata: [DONE]\n\n')
    assert b'"sequence_number":8' in framer.failure(error)
    assert (
        SSEFramer("messages")
        .failure(error)
        .startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error"')
    )


def test_message_stop_ends_a_stream_of_messages():
    framer = SSEFramer("messages")
    framer.feed(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert framer.has_ended
