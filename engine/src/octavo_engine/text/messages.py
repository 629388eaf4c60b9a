"""Normalises chat messages for templates: text content, arguments of tool calls as objects, no nulls.

Clients send content as a string, a list of parts or null; templates concatenate it with strings. A part that is not
text raises an error that names it, since a model that cannot see an image would answer as if there were none. The input
is never changed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_engine.wire.errors import InvalidRequest

#: Type of a part -> its field with the text.
_TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}


class ToolArguments(dict[str, Any]):
    """The arguments of an earlier tool call: a dict that becomes JSON text if a template concatenates or prints it."""

    def __init__(self, text: str, members: Mapping[str, Any]) -> None:
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def normalise_messages(messages: Sequence[Mapping[str, Any]], *, keeps_null: bool = False) -> list[dict[str, Any]]:
    """Normalise messages. Raises InvalidRequest, which names the message.

    `keeps_null`: null content of a message with tool calls stays None, for templates that test for it.
    """
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed.", param="messages")
    normal = [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for sent, message in zip(messages, normal, strict=True):
        if keeps_null and sent.get("content") is None and "tool_calls" in message:
            message["content"] = None
    return normal


def _normalise(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role.", param=f"{where}.role")
    if message.get("function_call"):
        raise InvalidRequest(f"{where}.function_call is not supported: send tool_calls instead.", param=where)
    normal = {key: value for key, value in message.items() if value is not None}
    normal["content"] = content_text(message.get("content"), f"{where}.content")
    if "reasoning" in normal:
        normal.setdefault("reasoning_content", normal["reasoning"])
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if calls:
        normal["tool_calls"] = calls
    else:
        normal.pop("tool_calls", None)
    return normal


def content_text(content: object, where: str) -> str:
    """Return the text of a message's content; parts are joined by newlines. Raises InvalidRequest."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string, a list of parts, or null.", param=where)
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be a string or an object with a type.", param=where)
    if kind not in _TEXT_PARTS:
        raise InvalidRequest(f"{where} is of type {kind!r}; this model accepts only text.", param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{_TEXT_PARTS[kind]} must be a string.", param=where)
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise InvalidRequest(f"{where} must be a list.", param=where)
    return [_with_object_arguments(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _with_object_arguments(call: object, where: str) -> dict[str, Any]:
    """Parse a call's arguments: clients send JSON text, but templates serialise objects themselves."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequest(f"{where} must be an object with a function.", param=where)
    function = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name must be a string.", param=f"{where}.function.name")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        function["arguments"] = _parsed(arguments or "{}", where)
    elif isinstance(arguments, Mapping):
        function["arguments"] = ToolArguments(json.dumps(arguments, ensure_ascii=False), arguments)
    return {**call, "function": function}


def _parsed(arguments: str, where: str) -> Any:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}.function.arguments is not valid JSON: {error}", param=where) from error
    return ToolArguments(arguments, parsed) if isinstance(parsed, dict) else parsed
