"""Tools of a chat request, and the calls in its response and chunks."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel, ConfigDict, PrivateAttr

from octavo_server.openai.entries import Entries
from octavo_server.output_parsing.tool_use import Mode, ToolSettings, ToolUse, tool_use


class ToolFunction(BaseModel):
    """A function that the model may call. `strict` has no effect: a call that `tool_choice` forces (by "required" or a
    name) always follows the schema of `parameters`, any other call is not constrained."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: ToolFunction

    def described(self) -> dict[str, Any]:
        """The tool as a dict in the form that chat templates expect."""
        return {"type": self.type, **self.model_dump(exclude_none=True)}


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolFields(BaseModel):
    tools: Entries[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    _places: list[str] | None = PrivateAttr(None)

    def name_tools(self, places: list[str]) -> None:
        """Set the names of the tools' schemas in a body of another dialect, for errors."""
        self._places = places

    def described_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tools is None else [tool.described() for tool in self.tools]

    def tool_use(self, settings: ToolSettings) -> ToolUse:
        """Check `tools` and `tool_choice`. Raises InvalidRequest if they are invalid or not allowed by `settings`."""
        mode: Mode | None = "named" if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        parallel, places = self.parallel_tool_calls, self._places
        return tool_use(self.described_tools(), mode, name, parallel=parallel, settings=settings, places=places)


class CalledFunction(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class CalledFunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """Part of a tool call in a chunk; only the first part of a call has `id`, `type` and the name."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
