"""Normalises chat messages for templates: content in the template's format, arguments of calls as objects, no nulls.

Clients send content as a string, a list of parts or null; most templates concatenate it with strings, others read the
parts. A part that is not text raises an error that names it, since a model that cannot see an image would answer as if
there were none. The input is never changed.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo_engine.wire.errors import InvalidRequest

#: Type of a part -> its field with the text.
_TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}


SYSTEM_ROLES = frozenset({"system", "developer"})


class ContentFormat(NamedTuple):
    """`wraps`: a text becomes a list of one part. `joins`: several parts become one text, with newlines between."""

    wraps: bool = False
    joins: bool = True


TEXT, PARTS = ContentFormat(), ContentFormat(wraps=True, joins=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRules:
    """Properties of a template that determine the form of its messages.

    `keeps_null`: null content of a message with tool calls stays None, for templates that test for it.
    `knows_developer`: False renames OpenAI's newer role "developer" to "system", as templates omit unknown roles.
    `joined_systems`: roles of two leading messages that become one, as the template does not show both.
    `formats`: by role, or "call" for a message with tool calls; a role that is missing has the format of "user".
    """

    keeps_null: bool = False
    knows_developer: bool = True
    joined_systems: Set[tuple[str, str]] = frozenset()
    formats: Mapping[str, ContentFormat] = field(default_factory=dict)


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


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], rules: MessageRules = MessageRules()
) -> list[dict[str, Any]]:
    """Normalise messages. Raises InvalidRequest, which names the message."""
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed.", param="messages")
    normal = [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not rules.knows_developer:
        for message in normal:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    normal = _join_leading(normal, rules.joined_systems)
    for message in normal:
        content, has_calls = message["content"], "tool_calls" in message
        if content is not None or not (rules.keeps_null and has_calls):
            wanted = rules.formats.get("call" if has_calls else message["role"])
            message["content"] = _in_format(content, wanted or rules.formats.get("user", TEXT))
    return normal


def _join_leading(messages: list[dict[str, Any]], pairs: Set[tuple[str, str]]) -> list[dict[str, Any]]:
    """Join neighbours with these pairs of roles among the leading system messages, with blank lines between texts."""
    joined = messages[:1]
    for i, message in enumerate(messages[1:], start=1):
        pair = joined[-1]["role"], message["role"]
        if not SYSTEM_ROLES.issuperset(pair):
            return joined + messages[i:]
        if pair in pairs:
            texts = [str(text) for each in (joined[-1], message) if (text := _in_format(each["content"], TEXT))]
            joined[-1] = {**joined[-1], "content": "\n\n".join(texts)}
        else:
            joined.append(message)
    return joined


def _in_format(content: str | list[str] | None, wanted: ContentFormat) -> str | list[dict[str, str]]:
    if content is None:
        content = [] if wanted == PARTS else ""
    if wanted.joins and not isinstance(content, str):
        content = "\n".join(content)
    if isinstance(content, str) and not wanted.wraps:
        return content
    return [{"type": "text", "text": text} for text in ([content] if isinstance(content, str) else content)]


def append_text(message: dict[str, Any], text: str) -> None:
    """Append a text to the content of a normalised message."""
    if isinstance(message["content"], str):
        message["content"] += text
    elif message["content"]:
        message["content"][-1]["text"] += text
    else:
        message["content"].append({"type": "text", "text": text})


def _normalise(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role.", param=f"{where}.role")
    if message.get("function_call"):
        raise InvalidRequest(f"{where}.function_call is not supported: send tool_calls instead.", param=where)
    normal = {key: value for key, value in message.items() if value is not None}
    normal["content"] = _texts(message.get("content"), f"{where}.content")
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
    texts = _texts(content, where)
    return texts if isinstance(texts, str) else "\n".join(texts or ())


def _texts(content: object, where: str) -> str | list[str] | None:
    """Return a text, the texts of parts, or None for null. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string, a list of parts, or null.", param=where)
    return [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]


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
