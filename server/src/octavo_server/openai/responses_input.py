"""Converts the input items of `/v1/responses` to chat messages.

A function call and its reasoning become part of the assistant's message; the output of the call becomes a message with
the role "tool". Items that refer to stored data or aren't text are rejected with an error that names them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict

from octavo_server.openai.entries import Entries
from octavo_server.openai.tools import call_of_function, input_arguments

#: Type of a content part -> the field that holds its text.
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text", "refusal": "refusal"}
#: Role in an item -> role for the chat template, where they differ.
_ROLES = {"developer": "system"}
#: Items of tools that OpenAI's servers run, which hold no text for the model.
_WITHOUT_TEXT = frozenset({"web_search_call", "mcp_list_tools"})

Message = dict[str, Any]


class InputItem(BaseModel):
    """An item of the input. Its `type` determines which fields it must have; an item without `type` is a message."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    role: str | None = None
    content: str | Entries[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Entries[dict[str, Any]] | None = None


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in the prompt, which is vLLM's for a tool of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def conversation(instructions: str | None, given: str | Sequence[InputItem]) -> list[Message]:
    """Convert the input to chat messages. Raises InvalidRequest, which names the item."""
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    reasoning = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        match item.type:
            case None | "message":
                messages.append(_message(item, where, reasoning))
                reasoning = ""
            case "function_call" | "custom_tool_call":
                _assistant_for_calls(messages, reasoning).append(_call(item, where))
                reasoning = ""
            case "function_call_output" | "custom_tool_call_output":
                messages.append(_output(item, where))
            case "reasoning":
                reasoning = _text(item.content or (), where)
            case "item_reference":
                message = f"{where} refers to a stored item, but this server stores no responses: send the item itself."
                raise InvalidRequest(message, param=where)
            case kind if kind in _WITHOUT_TEXT:
                pass
            case kind:
                supported = "message, reasoning, function_call, custom_tool_call and the outputs of calls"
                raise InvalidRequest(f"{where} is of type {kind!r}; supported are {supported}.", param=f"{where}.type")
    return messages


def _message(item: InputItem, where: str, reasoning: str) -> Message:
    role = _needed(item.role, f"{where}.role")
    message = {"role": _ROLES.get(role, role), "content": _text(item.content, f"{where}.content")}
    return {**message, **_reasoning_fields(reasoning)} if role == "assistant" else message


def _assistant_for_calls(messages: list[Message], reasoning: str) -> list[Message]:
    """Return the list of calls of the last message; first append an assistant message if the last one has another role,
    or if reasoning precedes the call."""
    if not messages or messages[-1]["role"] != "assistant" or reasoning:
        messages.append({"role": "assistant", "content": None, **_reasoning_fields(reasoning)})
    calls: list[Message] = messages[-1].setdefault("tool_calls", [])
    return calls


def _reasoning_fields(reasoning: str) -> Message:
    """Fields with the reasoning, under both names that chat templates use."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def _call(item: InputItem, where: str) -> Message:
    name = flat_name(_needed(item.name, f"{where}.name"), item.namespace)
    if item.type == "custom_tool_call":
        arguments = input_arguments(_needed(item.input, f"{where}.input"))
    else:
        arguments = _needed(item.arguments, f"{where}.arguments")
    return call_of_function(_needed(item.call_id, f"{where}.call_id"), name, arguments)


def _output(item: InputItem, where: str) -> Message:
    content = _text(item.output, f"{where}.output")
    return {"role": "tool", "tool_call_id": _needed(item.call_id, f"{where}.call_id"), "content": content}


def _text(content: str | Sequence[Mapping[str, Any]] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{where} is missing.", param=where)
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    field = _PARTS.get(str(kind))
    if field is None:
        message = f"{where} is of type {kind!r}; only text is supported: input_text and output_text."
        raise InvalidRequest(message, param=f"{where}.type")
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{field} must be a string.", param=f"{where}.{field}")
    return text


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where} is missing.", param=where)
    return value
