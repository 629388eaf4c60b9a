"""Converts the system prompt and the messages of the Messages API to chat messages.

The results of tools precede the text of their message, each as a message with the role "tool". Blocks that aren't text
are rejected with an error that names them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict

from octavo_server.openai.entries import Entries

#: Begins a block of Claude Code's system prompt that differs in each request, which would defeat the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header"
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}

Message = dict[str, Any]
Blocks = Sequence[Mapping[str, Any]]


class MessageParam(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Entries[dict[str, Any]]


def conversation(system: str | Blocks | None, messages: Sequence[MessageParam]) -> list[Message]:
    """Chat messages of a request. Messages with the role "system" join the system prompt, as in vLLM.

    Raises InvalidRequest, which names the block.
    """
    system_texts = _system_texts(system or "", "system")
    turns: list[Message] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        match message.role:
            case "system":
                system_texts += _system_texts(message.content, f"{where}.content")
            case "user":
                turns += _user_turn(message.content, f"{where}.content")
            case "assistant":
                turns.append(_assistant_turn(message.content, f"{where}.content"))
            case role:
                raise InvalidRequest(f"{where}.role is {role!r}; send 'user' or 'assistant'.", param=f"{where}.role")
    text = "".join(system_texts)
    return [{"role": "system", "content": text}, *turns] if text else turns


def continues_answer(messages: Sequence[Message]) -> bool:
    """True if the conversation ends with the beginning of the answer, which the model then continues."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _system_texts(system: str | Blocks, where: str) -> list[str]:
    blocks = _blocks_of(system, ("text",), where)
    texts = [_field(block, "text", place) for _, place, block in blocks]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _user_turn(content: str | Blocks, where: str) -> list[Message]:
    results, parts = [], []
    for kind, place, block in _blocks_of(content, _BLOCKS["user"], where):
        if kind == "tool_result":
            results.append(_tool_result(block, place))
        else:
            parts.append(_field(block, "text", place))
    return results if results and not parts else [*results, {"role": "user", "content": _joined(parts)}]


def _assistant_turn(content: str | Blocks, where: str) -> Message:
    parts, reasoning, calls = [], [], []
    for kind, place, block in _blocks_of(content, _BLOCKS["assistant"], where):
        if kind == "text":
            parts.append(_field(block, "text", place))
        elif kind == "thinking":
            reasoning.append(_field(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_tool_call(block, place))
    message: Message = {"role": "assistant", "content": _joined(parts) if parts or not calls else None}
    if reasoning:
        message |= {"reasoning": "".join(reasoning), "reasoning_content": "".join(reasoning)}
    return {**message, "tool_calls": calls} if calls else message


def _tool_call(block: Mapping[str, Any], where: str) -> Message:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.input must be an object.", param=f"{where}.input")
    function = {"name": _field(block, "name", where), "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": _field(block, "id", where), "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], where: str) -> Message:
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise InvalidRequest(f"{where}.content must be a string or an array.", param=f"{where}.content")
    blocks = _blocks_of(content, ("text",), f"{where}.content")
    text = "\n".join(_field(part, "text", place) for _, place, part in blocks)
    return {"role": "tool", "tool_call_id": _field(block, "tool_use_id", where), "content": text}


def _blocks_of(content: str | Blocks, supported: Sequence[str], where: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Type, path and block of each block; a text is one block."""
    if isinstance(content, str):
        return [("text", where, {"text": content})] if content else []
    blocks = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in supported:
            message = f"{place} is of type {kind!r}; supported here: {', '.join(supported)}."
            raise InvalidRequest(message, param=f"{place}.type")
        blocks.append((kind, place, block))
    return blocks


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value


def _joined(parts: list[str]) -> str | list[Message]:
    return "".join(parts) if len(parts) < 2 else [{"type": "text", "text": part} for part in parts]
