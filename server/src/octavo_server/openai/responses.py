"""`/v1/responses`: the body of a request, and its conversion to a chat request. The server stores no responses.

Fields that need stored responses, or tools that the server runs, are rejected with a remedy; fields that tune features
which this server lacks (cache keys, tiers, obfuscation) are accepted.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, Field

from octavo_server.openai.chat import ChatCompletionRequest, ReasoningEffort
from octavo_server.openai.entries import Entries, NullIsUnset
from octavo_server.openai.fields import SamplingFields
from octavo_server.openai.request_parser import validate_request
from octavo_server.openai.responses_input import InputItem, conversation, flat_name
from octavo_server.openai.structured import StructuredOutputsBody

logger = logging.getLogger(__name__)

#: Fields that this body and a chat request both have, under the same name.
_SAME_NAME = (
    *SamplingFields.model_fields,
    *("parallel_tool_calls", "chat_template_kwargs", "structured_outputs", "include_stop_str_in_output"),
    "include_reasoning",
)
#: Types of tools that OpenAI's servers run, or that only OpenAI's models know: the model gets none of them.
_HOSTED = frozenset(
    {
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("file_search", "mcp", "code_interpreter", "image_generation", "tool_search", "programmatic_tool_calling"),
        *("computer", "computer_use", "computer_use_preview", "local_shell", "shell", "apply_patch"),
    }
)
#: The only value of `include` that has an effect.
LOGPROBS = "message.output_text.logprobs"

_TEXT = {"type": "text"}  # a format that asks for nothing
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


class TextFormat(NullIsUnset):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """`verbosity` is passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(BaseModel):
    """`effort` is passed to the chat template; no summary is generated."""

    model_config = ConfigDict(extra="allow")

    effort: ReasoningEffort | None = None


class AnyTool(BaseModel):
    """A tool of any type. `format`: of a custom tool's input. `tools`: those of a namespace."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: Entries["AnyTool"] | None = None


class AnyToolChoice(BaseModel):
    """A choice of any type. `mode` and `tools`: those of "allowed_tools"."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Entries["AnyToolChoice"] | None = None


class NamespacedName(NamedTuple):
    name: str
    namespace: str


class OfferedTool(NamedTuple):
    """A function or custom tool. `place`: its path in the body."""

    place: str
    tool: AnyTool
    own_name: str
    namespace: str | None

    @property
    def name(self) -> str:
        """Name of the tool in the prompt."""
        return flat_name(self.own_name, self.namespace)

    def as_chat(self) -> dict[str, Any]:
        fields = {"description", "format"} if self.tool.type == "custom" else {"description", "parameters", "strict"}
        described = {"name": self.name, **self.tool.model_dump(include=fields, exclude_none=True)}
        return {"type": self.tool.type, self.tool.type: described}

    def is_chosen(self, choice: AnyToolChoice) -> bool:
        if choice.type == "namespace":
            return self.namespace is not None and self.namespace == choice.name
        in_namespace = choice.namespace in (None, self.namespace)
        return self.tool.type == choice.type and in_namespace and choice.name in (self.name, self.own_name)


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
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises InvalidRequest for fields that a stateless server can't support."""
        extra = self.model_extra or {}
        for name, message in _REFUSED.items():
            if getattr(self, name, None) or (extra.get(name) or _TEXT) != _TEXT:
                raise InvalidRequest(message, param=name)
        shape = self.structured_outputs and self.structured_outputs.shape()
        if shape and self.text is not None and self.text.format is not None:
            message = "structured_outputs and text.format each request a structured output: send one of them."
            raise InvalidRequest(message, param="structured_outputs")
        if not self.input:
            raise InvalidRequest("input must hold a text or at least one item.", param="input")

    def as_chat(self) -> ChatCompletionRequest:
        """Convert this request to a chat request. Raises InvalidRequest, which names the field of `/v1/responses`."""
        values = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        values["messages"] = conversation(self.instructions, self.input)
        values["tools"] = None if self.tools is None else [tool.as_chat() for tool in self._offered()]
        values["tool_choice"] = self._choice()
        values["response_format"] = self._format()
        values["max_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            values["reasoning_effort"] = self.reasoning.effort
        if self.text is not None:
            values["verbosity"] = self.text.verbosity
        if self.wants_logprobs:
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        chat = validate_request(values, ChatCompletionRequest)
        chat.name_tools([f"{tool.place}.parameters" for tool in self._offered()])
        chat.name_format("text.format.schema")
        return chat

    def namespaced_names(self) -> dict[str, NamespacedName]:
        """Name in the prompt -> name and namespace, for each tool of a namespace."""
        tools = self._offered()
        return {
            tool.name: NamespacedName(tool.own_name, tool.namespace) for tool in tools if tool.namespace is not None
        }

    def _offered(self) -> list[OfferedTool]:
        """The tools that the model gets."""
        return [*_offered(self.tools or (), "tools")]

    def _choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if not isinstance(choice, AnyToolChoice):
            return choice
        if choice.type == "allowed_tools":
            allowed = [named for entry in choice.tools or () for named in self._chosen(entry)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": allowed}}
        named = self._chosen(choice)
        if len(named) != 1:
            message = (
                f"tool_choice names {len(named)} tools: send the type and the name of one function or custom tool."
            )
            raise InvalidRequest(message, param="tool_choice")
        return named[0]

    def _chosen(self, choice: AnyToolChoice) -> list[dict[str, Any]]:
        """The tools that a choice names, as choices of the chat API. Raises InvalidRequest if there is none."""
        found = [tool for tool in self._offered() if tool.is_chosen(choice)]
        found = [tool for tool in found if tool.name == choice.name] or found  # before tools of namespaces
        if not found and choice.type not in _HOSTED:
            message = f"tool_choice names {choice.name!r} of type {choice.type!r}, which is not in tools."
            raise InvalidRequest(message, param="tool_choice")
        return [{"type": tool.tool.type, tool.tool.type: {"name": tool.name}} for tool in found]

    def _format(self) -> dict[str, Any] | None:
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type != "json_schema":
            return None if asked is None else {"type": asked.type}
        if asked.schema_ is None:
            message = "text.format of type 'json_schema' needs schema, a JSON Schema."
            raise InvalidRequest(message, param="text.format.schema")
        return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}


def _offered(tools: Sequence[AnyTool], where: str, namespace: str | None = None) -> Iterator[OfferedTool]:
    """Functions and custom tools, also those of namespaces. Raises InvalidRequest for a tool of an unknown type."""
    for i, tool in enumerate(tools):
        place = f"{where}[{i}]"
        if tool.type in ("function", "custom"):
            yield OfferedTool(place, tool, _name_of(tool, place), namespace)
        elif tool.type == "namespace" and namespace is None:
            yield from _offered(tool.tools or (), f"{place}.tools", _name_of(tool, place))
        elif tool.type in _HOSTED:
            _warn_ignored(tool.type)
        else:
            message = f"{place} is of type {tool.type[:100]!r}; supported are functions, custom tools and namespaces."
            raise InvalidRequest(message, param=f"{place}.type")


def _name_of(tool: AnyTool, place: str) -> str:
    if tool.name is None:
        raise InvalidRequest(f"{place}.name is missing.", param=f"{place}.name")
    return tool.name


@cache
def _warn_ignored(kind: str) -> None:
    """Warn once for each of the types in `_HOSTED`."""
    logger.warning("requests have tools of type %s, which this server doesn't run: their models don't get them", kind)
