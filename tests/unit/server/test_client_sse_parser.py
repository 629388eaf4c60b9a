"""The SSE parser returns the same events however the network splits them."""

import pytest
from octavo_server.client.api import ApiFailure, SSEParser, normalise_url
from octavo_server.client.chunks import decode_chunk, error_message

STREAM = b': hello\n\ndata: {"a": 1}\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\ndata: t\xc3\xa4g\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"t\xc3\xa4g", b"[DONE]"]


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\r\n", b"\n").replace(b"\n", b"\r")], ids=["mixed", "cr"])
@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_chunks_of_any_size_give_the_same_events(stream: bytes, size: int) -> None:
    reader = SSEParser()
    found = [event for at in range(0, len(stream), size) for event in reader.feed(stream[at : at + size])]
    assert found == EVENTS[: len(found)]
    assert len(found) >= len(EVENTS) - stream.endswith(b"\r")


def test_unfinished_event_is_not_returned() -> None:
    assert SSEParser().feed(b"data: 1\n") == []


@pytest.mark.parametrize(
    ("data", "text", "has_content"),
    [
        (b'{"choices": [{"text": "a"}]}', "a", True),
        (b'{"choices": [{"delta": {"content": "a"}}]}', "a", True),
        (b'{"choices": [{"delta": {"reasoning": "r"}}]}', "", True),
        (b'{"choices": [{"delta": {"tool_calls": [{}]}}]}', "", True),
        (b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', "", False),
        (b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}', "", False),
    ],
)
def test_chunk_has_text_reasoning_and_finish_reason(data: bytes, text: str, has_content: bool) -> None:
    chunk = decode_chunk(data)
    assert (chunk.text, chunk.has_content) == (text, has_content)


@pytest.mark.parametrize(
    "error", [{"error": {"message": "m"}}, {"message": "m"}, {"detail": "m"}, {"error": "m"}, "m"], ids=str
)
def test_error_message_is_found_in_any_body(error: object) -> None:
    assert error_message(error) == "m"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("h:1", "http://h:1/v1"),
        ("https://h/openai/v1", "https://h/openai/v1"),
    ],
)
def test_urls_are_normalised(given: str, url: str) -> None:
    assert normalise_url(given) == url


def test_invalid_url_is_rejected() -> None:
    with pytest.raises(ApiFailure, match="give one such as"):
        normalise_url("ftp://h")
