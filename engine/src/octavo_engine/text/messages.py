"""Normalises chat messages for templates: content in the template's format, arguments of calls as objects, no nulls.

Clients send content as a string, a list of parts or null; most templates concatenate it with strings, others read the
parts. A part that is not text raises an error that names it, since a model that cannot see an image would answer as if
there were none. For a vision model, `take_images` first replaces each image by IMAGE, so that no image data reach a
template. The input is never changed.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from octavo_engine.wire.errors import InvalidRequest

#: Type of a part -> its field with the text.
_TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
_IMAGE_PARTS = ("image_url", "image_pil")
#: The place of an image in the content of a message.
IMAGE: Mapping[str, str] = MappingProxyType({"type": "image"})
Part = str | Mapping[str, str]  # a text, or IMAGE

SYSTEM_ROLES = frozenset({"system", "developer"})


class ContentFormat(NamedTuple):
    """`wraps`: a text becomes a list of one part. `joins`: several text parts become one text, joined by newlines.

    `shows_images`: content with images becomes a list, and the template renders the images; otherwise, the image token
    is inserted into the text.
    """

    wraps: bool = False
    joins: bool = True
    shows_images: bool = False


TEXT, PARTS = ContentFormat(), ContentFormat(wraps=True, joins=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRules:
    """Properties of a template that determine the form of its messages.

    `keeps_null`: null content of a message with tool calls stays None, for templates that test for it.
    `knows_developer`: False renames OpenAI's newer role "developer" to "system", as templates omit unknown roles.
    `joined_systems`: roles of two leading messages that become one, as the template does not show both.
    `formats`: by role, or "call" for a message with tool calls; a role that is missing has the format of "user".
    `image_token`: stands for an image in a rendered prompt, so no text may hold it; None: the model takes no images.
    """

    keeps_null: bool = False
    knows_developer: bool = True
    joined_systems: Set[tuple[str, str]] = frozenset()
    formats: Mapping[str, ContentFormat] = field(default_factory=dict)
    image_token: str | None = None


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


def take_images(messages: Sequence[Any]) -> tuple[list[Any], dict[str, Mapping[str, Any]]]:
    """Return the messages with IMAGE in place of each image part, and the image parts by their place, in order."""
    changed, images = list(messages), dict[str, Mapping[str, Any]]()
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = list(content) if isinstance(content, Sequence) and not isinstance(content, str) else []
        for j, part in enumerate(parts):
            if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS:
                images[f"messages[{i}].content[{j}]"], parts[j] = part, IMAGE
        if IMAGE in parts:
            changed[i] = {**message, "content": parts}
    return changed, images


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], rules: MessageRules = MessageRules()
) -> list[dict[str, Any]]:
    """Normalise messages. Raises InvalidRequest, which names the message."""
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed.", param="messages")
    normal = [_normalise(message, f"messages[{i}]", rules.image_token) for i, message in enumerate(messages)]
    if not rules.knows_developer:
        for message in normal:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    normal = _join_leading(normal, rules.joined_systems, rules.image_token)
    for message in normal:
        content, has_calls = message["content"], "tool_calls" in message
        if content is not None or not (rules.keeps_null and has_calls):
            wanted = rules.formats.get("call" if has_calls else message["role"])
            wanted = wanted or rules.formats.get("user", TEXT)
            message["content"] = _in_format(content, wanted, rules.image_token)
    return normal


def _join_leading(
    messages: list[dict[str, Any]], pairs: Set[tuple[str, str]], image_token: str | None
) -> list[dict[str, Any]]:
    """Join neighbours with these pairs of roles among the leading system messages, with blank lines between texts."""
    joined = messages[:1]
    for i, message in enumerate(messages[1:], start=1):
        pair = joined[-1]["role"], message["role"]
        if not SYSTEM_ROLES.issuperset(pair):
            return joined + messages[i:]
        if pair in pairs:
            both = (_in_format(each["content"], TEXT, image_token) for each in (joined[-1], message))
            texts = [str(text) for text in both if text]
            joined[-1] = {**joined[-1], "content": "\n\n".join(texts)}
        else:
            joined.append(message)
    return joined


def _in_format(
    content: str | list[Part] | None, wanted: ContentFormat, image_token: str | None
) -> str | list[dict[str, str]]:
    if content is None:
        content = [] if wanted.wraps and not wanted.joins else ""
    if not isinstance(content, str) and IMAGE in content:
        if wanted.shows_images:
            return [_as_part(part) for part in content]
        content = [image_token or "" if part is IMAGE else part for part in content]
    if wanted.joins and not isinstance(content, str):
        content = "\n".join(map(str, content))
    if isinstance(content, str) and not wanted.wraps:
        return content
    return [_as_part(part) for part in ([content] if isinstance(content, str) else content)]


def _as_part(part: Part) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else dict(part)


def append_text(message: dict[str, Any], text: str) -> None:
    """Append a text to the content of a normalised message."""
    if isinstance(message["content"], str):
        message["content"] += text
    elif message["content"] and "text" in message["content"][-1]:
        message["content"][-1]["text"] += text
    else:
        message["content"].append({"type": "text", "text": text})


def _normalise(message: Mapping[str, Any], where: str, image_token: str | None) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role.", param=f"{where}.role")
    if message.get("function_call"):
        raise InvalidRequest(f"{where}.function_call is not supported: send tool_calls instead.", param=where)
    normal = {key: value for key, value in message.items() if value is not None}
    normal["content"] = _parts(message.get("content"), f"{where}.content", image_token)
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
    parts = _parts(content, where, None)
    return parts if isinstance(parts, str) else "\n".join(map(str, parts or ()))


def _parts(content: object, where: str, image_token: str | None) -> str | list[Part] | None:
    """Return a text, the texts and images of parts, or None for null. Raises InvalidRequest."""
    if content is None:
        return None
    if isinstance(content, str):
        return _without_token(content, where, image_token)
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string, a list of parts, or null.", param=where)
    return [_part(part, f"{where}[{i}]", image_token) for i, part in enumerate(content)]


def _part(part: object, where: str, image_token: str | None) -> Part:
    if part is IMAGE:
        return IMAGE
    if isinstance(part, str):
        return _without_token(part, where, image_token)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be a string or an object with a type.", param=where)
    if kind not in _TEXT_PARTS:
        raise InvalidRequest(f"{where} is of type {kind!r}; {_reason(kind, image_token)}", param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{_TEXT_PARTS[kind]} must be a string.", param=where)
    return _without_token(text, where, image_token)


def _reason(kind: str, image_token: str | None) -> str:
    if image_token is None:
        return "this model accepts only text: leave it out."
    if kind in _IMAGE_PARTS:
        return "images are accepted only by chat completions: leave it out."
    return "this version accepts no such parts: leave it out."


def _without_token(text: str, where: str, image_token: str | None) -> str:
    """Return the text. Raises InvalidRequest if it contains the image token, which stands for an image part only."""
    if image_token is not None and image_token in text:
        problem = f"{where} holds the text {image_token!r}, which stands for an image"
        raise InvalidRequest(f"{problem}: write it in another way, and send images as parts.", param=where)
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
