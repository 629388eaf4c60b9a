"""Messages normalised for templates, and errors that name the message."""

from typing import Any

import pytest
from octavo_engine.text.messages import normalise_messages
from octavo_engine.wire.errors import InvalidRequest


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}], "a\nb\nc"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "a"}], "Hm\na"),
    ],
)
def test_content_becomes_text(content: Any, text: str) -> None:
    assert normalise_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]


def test_absent_content_is_empty_and_other_fields_are_kept() -> None:
    message = {"role": "tool", "tool_call_id": "1", "name": "f"}
    assert normalise_messages([message]) == [{**message, "content": ""}]


@pytest.mark.parametrize(
    ("arguments", "parsed"), [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("[1]", [1])]
)
def test_tool_call_arguments_become_objects(arguments: Any, parsed: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    [normal] = normalise_messages([message])
    assert normal["tool_calls"] == [{**call, "function": {"name": "f", "arguments": parsed}}]
    assert call["function"] == {"name": "f", "arguments": arguments}
    assert message["content"] is None


def test_null_fields_are_removed() -> None:
    sent = {"role": "assistant", "content": None, "name": None, "function_call": None, "refusal": None}
    assert normalise_messages([sent]) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"reasoning": "Hm"}, "Hm"), ({"reasoning_content": "Hm"}, "Hm"), ({}, None), ({"reasoning": None}, None)],
)
def test_reasoning_gets_the_name_that_templates_use(fields: Any, found: Any) -> None:
    [normal] = normalise_messages([{"role": "assistant", "content": "x", **fields}])
    assert normal.get("reasoning_content") == found


@pytest.mark.parametrize("calls", [None, []])
def test_empty_tool_calls_are_removed(calls: Any) -> None:
    assert "tool_calls" not in normalise_messages([{"role": "assistant", "content": "x", "tool_calls": calls}])[0]


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        ([{"content": "x"}], "messages[0].role", "with a role"),
        ([{"role": "user", "content": "x"}, "x"], "messages[1].role", "with a role"),
        ([{"role": "user", "content": 1}], "messages[0].content", "list of parts"),
        ([{"role": "user", "content": [1]}], "messages[0].content[0]", "object with a type"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]", "object with a type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "must be a string"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1]",
            "'image_url'; this model accepts only text: leave it out",
        ),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]", "with a function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
            "a string",
        ),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0]", "tool_calls"),
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls", "must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0]",
            "not valid JSON",
        ),
    ],
)
def test_refusals_name_the_message(messages: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        normalise_messages(messages)
    assert caught.value.param == param
