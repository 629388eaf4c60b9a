"""Bodies of `/v1/messages`, its `/render` and its `/count_tokens`, and their conversion to chat requests.

Tools that Anthropic's servers run and content that isn't text are rejected by name. Fields that only tune features
without an effect here (`metadata`, `service_tier`, `cache_control`) are accepted.
"""

from typing import Any, ClassVar, Literal

from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import INT32_MAX
from pydantic import BaseModel, ConfigDict, Field

from octavo_server.anthropic.content import MessageParam, continues_answer, conversation
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
    """No thread is stored: "create" has no effect; "continue" is a 404, after which clients send the whole thread."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


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
