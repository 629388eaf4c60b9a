"""Bodies of `/v1/messages`, its `/render` and its `/count_tokens`, and their conversion to chat requests.

Tools that Anthropic's servers run and content that isn't text are rejected by name. Fields that only tune features
without an effect here (`metadata`, `service_tier`, `cache_control`) are accepted. The results of tools precede the text
of their message, each as a message with the role "tool".
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import INT32_MAX
from pydantic import BaseModel, ConfigDict, Field

from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.entries import Entries, NullIsUnset
from octavo_server.openai.errors import ThreadNotFound
from octavo_server.openai.fields import LenientModel
from octavo_server.openai.request_parser import validate_request
from octavo_server.openai.unsupported import refuse_unsupported
from octavo_server.output_parsing.reasoning_formats import SWITCH

#: Fields that a chat request has under the same name.
_SAME_NAME = ("model", "chat_template_kwargs", "cache_salt")
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stream", "priority")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REFUSED = ("mcp_servers", "container", "compaction")
#: Begins a block of Claude Code's system prompt that differs in each request, which would defeat the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header"
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}

Message = dict[str, Any]
Blocks = Sequence[Mapping[str, Any]]


class ToolParam(BaseModel):
    """A tool of any type, so that the error for one that the server would have to run can name it."""

    model_config = ConfigDict(extra="allow")

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def as_chat(self, where: str) -> dict[str, Any]:
        if self.type not in (None, "custom"):
            message = (
                f"{where} is of type {self.type!r}; only tools that the client runs (type 'custom') are supported."
            )
            raise InvalidRequest(message, param=f"{where}.type")
        if self.input_schema is None:
            raise InvalidRequest(f"{where}.input_schema is missing.", param=f"{where}.input_schema")
        function: dict[str, Any] = {"name": self.name, "parameters": {"type": "object", **self.input_schema}}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoiceParam(LenientModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> str | dict[str, Any]:
        if self.type != "tool":
            return _CHOICES[self.type]
        if not self.name:
            raise InvalidRequest("tool_choice of type 'tool' needs name, the tool to call.", param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class OutputFormat(LenientModel, NullIsUnset):
    type: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(LenientModel):
    """`effort` is passed to the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class ThinkingParam(LenientModel):
    """Type "disabled" turns thinking off in the chat template. Else template and parser decide; a budget is ignored."""

    type: str


class ThreadParam(LenientModel):
    """No thread is stored: "create" has no effect; after the 404 for "continue", clients send all messages again."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class MessageParam(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Entries[dict[str, Any]]


class CountTokensRequest(LenientModel):
    """Fields that the prompt depends on."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {"messages": MessageParam, "tools": ToolParam}

    model: str | None = Field(None, description="A served name; the first one if left out.")
    messages: Entries[MessageParam]
    system: str | Entries[dict[str, Any]] | None = None
    tools: Entries[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None
    thread: ThreadParam | None = None
    thinking: ThinkingParam | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest for features of Anthropic's servers, and ThreadNotFound."""
        if self.thread is not None and self.thread.type == "continue":
            raise ThreadNotFound(self.thread.previous_message_id)
        for name in _REFUSED:
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(f"{name} is not supported: leave it out.", param=name)

    def as_chat(self) -> ChatCompletionRequest:
        """Convert this request to a chat request. Raises InvalidRequest, which names the field of the Messages API."""
        chat = validate_request(self._chat_fields(), ChatCompletionRequest)
        chat.name_tools([f"tools[{i}].input_schema" for i in range(len(self.tools or ()))])
        return chat

    def _chat_fields(self) -> dict[str, Any]:
        values = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        values["messages"] = conversation(self.system, self.messages)
        if continues_answer(values["messages"]):
            values["continue_final_message"] = True
        if self.thinking is not None and self.thinking.type == "disabled":
            values["chat_template_kwargs"] = {SWITCH: False, **(self.chat_template_kwargs or {})}
        if self.tools:
            values["tools"] = [tool.as_chat(f"tools[{i}]") for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            values["tool_choice"] = self.tool_choice.as_chat()
            values["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.effort is not None:
            values["reasoning_effort"] = self.output_config.effort
        return values


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: Entries[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, le=INT32_MAX)
    stream: bool | None = None
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")

    def as_chat(self) -> ChatCompletionRequest:
        chat = super().as_chat()
        chat.name_format("output_format.schema" if self.output_format else "output_config.format.schema")
        return chat

    def check(self) -> None:
        super().check()
        refuse_unsupported(self)

    def _chat_fields(self) -> dict[str, Any]:
        values = super()._chat_fields()
        values |= {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            values["stop"] = self.stop_sequences
        asked = self.output_format or (self.output_config.format if self.output_config else None)
        if asked is not None:
            if asked.schema_ is None:
                message = "output_config.format needs schema, a JSON Schema."
                raise InvalidRequest(message, param="output_config.format.schema")
            values["response_format"] = {"type": "json_schema", "json_schema": {"schema": asked.schema_}}
        return values


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
