"""`/v1/responses`: the body of a request, and its conversion to a chat request. The server stores no responses.

Fields that need stored responses, or tools that the server runs, are rejected with a remedy; fields that tune features
which this server lacks (cache keys, tiers, obfuscation) are accepted.
"""

from typing import Any, ClassVar, Literal

from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, Field

from octavo_server.openai.chat import ChatCompletionRequest, ReasoningEffort
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import SamplingFields
from octavo_server.openai.responses_input import InputItem, conversation
from octavo_server.openai.structured import StructuredOutputsBody

#: Fields that this body and a chat request both have, under the same name.
_SAME_NAME = (
    *SamplingFields.model_fields,
    *("parallel_tool_calls", "chat_template_kwargs", "structured_outputs", "include_stop_str_in_output"),
    "include_reasoning",
)
#: The only value of `include` that has an effect.
LOGPROBS = "message.output_text.logprobs"

_STATELESS = "this server stores no responses: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": f"previous_response_id is not supported: {_STATELESS}.",
    "conversation": f"conversation is not supported: {_STATELESS}.",
    "background": f"background is not supported: {_STATELESS}, and read the response, streamed or not.",
    "prompt": "prompt is not supported: this server stores no prompt templates, send instructions and input.",
    "previous_response": f"previous_response is not supported: {_STATELESS}.",
    "previous_input_messages": f"previous_input_messages is not supported: {_STATELESS}.",
    "response_format": "response_format is a field of the chat API: send text.format.",
}


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ReasoningConfig(BaseModel):
    """`effort` is passed to the chat template; no summary is generated."""

    model_config = ConfigDict(extra="allow")

    effort: ReasoningEffort | None = None


class AnyTool(BaseModel):
    """A tool of any type, so that the error for a tool that isn't a function can name its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AnyToolChoice(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None


class ResponsesRequest(SamplingFields):
    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {"input": InputItem, "tools": AnyTool}

    input: str | Entries[InputItem]
    instructions: str | None = None
    tools: Entries[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = None
    include: Entries[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None
    structured_outputs: StructuredOutputsBody | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: bool | None = None

    def echoed(self) -> dict[str, Any]:
        """Fields of the request that the response repeats."""
        asked = self.text.format if self.text else None
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "top_logprobs": self.top_logprobs,
            "tool_choice": choice.model_dump() if isinstance(choice, AnyToolChoice) else choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools or ()],
            "text": {"format": asked.model_dump(by_alias=True, exclude_unset=True) if asked else {"type": "text"}},
            "reasoning": self.reasoning.model_dump(exclude_unset=True) if self.reasoning else None,
            "user": self.user,
        }

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises InvalidRequest for fields that a stateless server can't support."""
        extra = self.model_extra or {}
        for name, message in _REFUSED.items():
            if getattr(self, name, None) or extra.get(name):
                raise InvalidRequest(message, param=name)
        if self.structured_outputs is not None and self.text is not None and self.text.format is not None:
            message = "structured_outputs and text.format each request a structured output: send one of them."
            raise InvalidRequest(message, param="structured_outputs")
        if self.truncation == "auto":
            message = "truncation 'auto' is not supported: shorten the input, or send 'disabled'."
            raise InvalidRequest(message, param="truncation")
        if not self.input:
            raise InvalidRequest("input must hold a text or at least one item.", param="input")

    def as_chat(self) -> ChatCompletionRequest:
        """Convert this request to a chat request. Raises InvalidRequest, which names the field of `/v1/responses`."""
        values = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        values["messages"] = conversation(self.instructions, self.input)
        values["tools"] = self._functions()
        values["tool_choice"] = self._choice()
        values["response_format"] = self._format()
        values["max_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            values["reasoning_effort"] = self.reasoning.effort
        if self.wants_logprobs:
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        chat = ChatCompletionRequest.model_validate(values)
        chat.name_tools([f"tools[{i}].parameters" for i in range(len(self.tools or ()))])
        chat.name_format("text.format.schema")
        return chat

    def _functions(self) -> list[dict[str, Any]] | None:
        return None if self.tools is None else [_function(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]

    def _choice(self) -> str | dict[str, Any] | None:
        if not isinstance(self.tool_choice, AnyToolChoice):
            return self.tool_choice
        if self.tool_choice.type != "function" or self.tool_choice.name is None:
            message = 'tool_choice must be "none", "auto", "required" or {"type": "function", "name": NAME}.'
            raise InvalidRequest(message, param="tool_choice")
        return {"type": "function", "function": {"name": self.tool_choice.name}}

    def _format(self) -> dict[str, Any] | None:
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type != "json_schema":
            return None if asked is None else {"type": asked.type}
        if asked.schema_ is None:
            message = "text.format of type 'json_schema' needs schema, a JSON Schema."
            raise InvalidRequest(message, param="text.format.schema")
        return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}


def _function(tool: AnyTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        message = f"{where} is of type {tool.type!r}; only tools of type 'function' are supported."
        raise InvalidRequest(message, param=f"{where}.type")
    if tool.name is None:
        raise InvalidRequest(f"{where}.name is missing.", param=f"{where}.name")
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}
