"""Raw bytes become a request model: bounds, then JSON, then types, with few errors for any number of wrong values."""

from contextlib import suppress

import pytest
from octavo_engine.wire.errors import InvalidRequest
from octavo_server.anthropic.messages import MessagesRequest
from octavo_server.api.chat_batch import BatchChatRequest
from octavo_server.api.invocations import InvocationShape
from octavo_server.config import RequestLimits
from octavo_server.openai import errors
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.errors import MalformedRequest
from octavo_server.openai.request_parser import parse_request
from octavo_server.openai.responses import ResponsesRequest
from octavo_testing.hostile_bodies import (
    BATCH,
    CHAT,
    COMPLETION,
    INVOCATIONS,
    MESSAGES,
    RESPONSES,
    SHAPES,
    hostile_body,
)
from pydantic import ValidationError

KINDS = {
    CHAT: ChatCompletionRequest,
    COMPLETION: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    BATCH: BatchChatRequest,
    INVOCATIONS: InvocationShape,
}
LIMITS = RequestLimits()
NUM_BYTES = 64 * 1024


def parse(raw, kind=ChatCompletionRequest, limits=LIMITS):
    return parse_request(raw, kind, limits)


@pytest.mark.parametrize("name", SHAPES)
def test_no_shape_causes_more_than_a_few_errors(name, monkeypatch):
    """Without the limit, a list of n wrong entries causes n or more errors of some hundred bytes each."""
    counts = []

    def malformed(error: ValidationError, where=""):
        counts.append(error.error_count())
        return errors.malformed(error, where)

    monkeypatch.setattr("octavo_server.openai.request_parser.malformed", malformed)
    path, raw = hostile_body(name, NUM_BYTES)
    with suppress(InvalidRequest):
        parse(raw, KINDS[path])
    assert sum(counts) <= errors.MAX_REPORTED_FIELDS


@pytest.mark.parametrize("name", SHAPES)
def test_bounds_are_checked_before_parsing(name, monkeypatch):
    def parsed(_):
        raise AssertionError("parsed")

    monkeypatch.setattr("octavo_server.openai.request_parser.from_json", parsed)
    path, raw = hostile_body(name, NUM_BYTES)
    with pytest.raises(InvalidRequest, match="--max-json-values"):
        parse(raw, KINDS[path], RequestLimits(max_json_values=0))


def test_errors_name_the_place_of_wrong_entries():
    with pytest.raises(MalformedRequest) as caught:
        parse(b'{"messages":[{"role":"user","content":"a"},{"role":"user","content":["a",1,2,3]}]}')
    assert caught.value.param == "messages[1].content"
    assert "messages[1].content[1]: Input should be an object" in str(caught.value)
    assert "content[2]" not in str(caught.value)


def test_very_many_wrong_fields_are_counted():
    raw = b'{"messages":[],"structured_outputs":{%b}}' % b",".join(b'"x%d":0' % i for i in range(5000))
    with pytest.raises(MalformedRequest, match="5000 fields"):
        parse(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "Invalid JSON: EOF"),
        (b"{", "Invalid JSON: EOF"),
        (b'{"a": "\xff"}', "Invalid JSON: invalid unicode"),
        (b"[]", "must be a JSON object, not an array"),
        (b"null", "must be a JSON object, not null"),
        (b"1.5", "must be a JSON object, not a number"),
    ],
)
def test_a_body_that_is_no_object_is_refused(raw, message):
    with pytest.raises(MalformedRequest, match=message):
        parse(raw)
