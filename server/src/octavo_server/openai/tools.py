"""Tools of a chat request, and the calls in its response and chunks."""

import json
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import StructuredOutputs
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from octavo_server.openai.entries import Entries, NullIsUnset
from octavo_server.output_parsing.tool_use import Mode, ToolSettings, ToolUse, tool_use


class ToolFunction(BaseModel):
    """A function that the model may call. `strict` has no effect: a call that `tool_choice` forces (by "required" or a
    name) always follows the schema of `parameters`, any other call is not constrained."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(BaseModel):
    """A tool whose input is a text. `format` is described to the model, not enforced."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class Tool(NullIsUnset):
    """A tool of a chat request. To the model a custom tool is a function with one text, `input`, as in vLLM."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function", "custom"] = "function"
    custom: CustomTool | None = Field(None, exclude=True)
    function: ToolFunction

    @model_validator(mode="before")
    @classmethod
    def _describe_custom(cls, sent: Any) -> Any:
        if not isinstance(sent, dict) or sent.get("type") != "custom":
            return sent
        custom = sent.get("custom") or {}
        return {**sent, "custom": custom, "function": _input_function(custom if isinstance(custom, dict) else {})}

    def described(self) -> dict[str, Any]:
        """The tool as a dict in the form that chat templates expect."""
        return {**self.model_dump(exclude_none=True), "type": "function"}


def _input_function(custom: dict[str, Any]) -> dict[str, Any]:
    """Describe a custom tool, which may be malformed, as a function."""
    name, description, form = (custom.get(key) for key in ("name", "description", "format"))
    texts = [description] if isinstance(description, str) else []
    grammar = form.get("grammar", form) if isinstance(form, dict) else None  # it is an object in chat requests
    if isinstance(grammar, dict) and "definition" in grammar:
        texts.append(f"The input must match this {grammar.get('syntax')} grammar:\n{grammar['definition']}")
    return {
        "name": name if isinstance(name, str) else "",
        "description": "\n\n".join(texts) or None,
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
    }


def input_arguments(text: Any) -> str:
    """Return the arguments of a custom tool's call as the model writes them."""
    return json.dumps({"input": text}, ensure_ascii=False)


def call_of_function(call_id: Any, name: Any, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ToolName(BaseModel):
    name: str


class NamedTool(NullIsUnset):
    type: Literal["function"] = "function"
    function: ToolName


class NamedCustomTool(BaseModel):
    type: Literal["custom"]
    custom: ToolName


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"]
    tools: Entries[NamedTool | NamedCustomTool]


class AllowedToolChoice(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedToolChoice


class ToolFields(BaseModel):
    tools: Entries[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    _places: list[str] | None = PrivateAttr(None)

    def name_tools(self, places: list[str]) -> None:
        """Set the names of the tools' schemas in a body of another dialect, for errors."""
        self._places = places

    def described_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model gets: all, or those that `tool_choice` allows."""
        return None if self.tools is None else [self.tools[i].described() for i in self._allowed()]

    @property
    def custom_tools(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools or () if tool.type == "custom")

    def _allowed(self) -> list[int]:
        """Indices of the tools that the model gets."""
        tools, choice = self.tools or [], self.tool_choice
        if not isinstance(choice, AllowedToolChoice):
            return [*range(len(tools))]
        names = {_name_of(tool) for tool in choice.allowed_tools.tools}
        return [i for i, tool in enumerate(tools) if tool.function.name in names]

    def tool_use(self, settings: ToolSettings, answer: StructuredOutputs | None) -> ToolUse:
        """Check `tools` and `tool_choice`. Raises InvalidRequest if they are invalid or not allowed by `settings`.
        `answer`: the requested format, if any."""
        mode, name = self._mode_and_name()
        places = self._places or [f"tools[{i}].{tool.type}.parameters" for i, tool in enumerate(self.tools or ())]
        return tool_use(
            self.described_tools(),
            mode,
            name,
            parallel=self.parallel_tool_calls,
            settings=settings,
            places=[places[i] for i in self._allowed()],
            answer=answer,
        )

    def _mode_and_name(self) -> tuple[Mode | None, str | None]:
        choice = self.tool_choice
        if isinstance(choice, NamedTool | NamedCustomTool):
            return "named", _name_of(choice)
        if not isinstance(choice, AllowedToolChoice):
            return choice, None
        names = {tool.function.name for tool in self.tools or ()}
        for tool in choice.allowed_tools.tools:
            if _name_of(tool) not in names:
                message = f"tool_choice allows {_name_of(tool)!r}, which is not in tools."
                raise InvalidRequest(message, param="tool_choice")
        return choice.allowed_tools.mode, None


def _name_of(choice: NamedTool | NamedCustomTool) -> str:
    return choice.function.name if isinstance(choice, NamedTool) else choice.custom.name


class CalledFunction(Struct):
    name: str
    arguments: str


class CalledCustomTool(Struct):
    name: str
    input: str


class ToolCall(Struct):
    id: str
    function: CalledFunction | UnsetType = UNSET
    type: str = "function"
    custom: CalledCustomTool | UnsetType = UNSET


class CalledFunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CalledCustomToolDelta(Struct):
    input: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """Part of a tool call in a chunk; only the first part of a call has `id`, `type` and the name."""

    index: int
    function: CalledFunctionDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    custom: CalledCustomToolDelta | UnsetType = UNSET
