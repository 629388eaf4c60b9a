"""`ToolUse`: the checked `tools` and `tool_choice` of one request, and their effect on grammar and output parser."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo_engine.grammar.schema import StrictSchema
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs

from octavo_server.output_parsing.required_tool import NamedToolParser, RequiredToolParser
from octavo_server.output_parsing.tool_call_formats import TOOL_PARSERS, ToolCallFormat, new_call_id
from octavo_server.output_parsing.tool_call_parser import ToolCallParser
from octavo_server.output_parsing.tool_schema import arguments_schema, calls_schema

AUTO_IS_OFF = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NAME_RULE = "1 to 128 characters of letters, digits, '_', '-' and '.'"

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """Values of the flags --tool-call-parser and --enable-auto-tool-choice."""

    parser: str | None = None
    allows_auto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """`tools` have the form that chat templates expect: `{"type": "function", "function": {...}}`. `name`: function
    that must be called, in mode "named"."""

    mode: Mode = "none"
    tools: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    one_call_only: bool = False
    call_format: ToolCallFormat | None = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """Structured output that forces the model to call, if `mode` demands it. Raises InvalidRequest, which names the
        tool, for an unsupported schema."""
        if self.mode in ("required", "named"):
            self._check_schemas()
        if self.mode == "required":
            return StructuredOutputs(json=calls_schema(self._functions, max_calls=1 if self.one_call_only else None))
        if self.mode == "named":
            return StructuredOutputs(json=arguments_schema(next(f for f in self._functions if f["name"] == self.name)))
        return None

    def constrain(self, params: SamplingParams) -> None:
        """Set the structured output of `mode` in the parameters. Raises InvalidRequest."""
        forced = self.structured_outputs()
        if params.structured_outputs is not None and self.mode != "none":
            message = f"tool_choice {self.mode!r} and a structured output can't be combined: send one of the two."
            raise InvalidRequest(message, param="tool_choice")
        params.structured_outputs = params.structured_outputs or forced

    def new_parser(self) -> ToolCallParser | None:
        """Make the parser of one answer; None if the answer can't have calls."""
        new_id = self.call_format.new_id if self.call_format else new_call_id
        if self.mode == "required":
            return RequiredToolParser(new_id)
        if self.mode == "named":
            assert self.name is not None
            return NamedToolParser(new_id, self.name)
        if self.mode == "auto":
            assert self.call_format is not None
            return self.call_format.parser_type(new_id, frozenset(f["name"] for f in self._functions))
        return None

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that the parser needs in the text even if they are special tokens."""
        return self.call_format.parser_type.markers if self.mode == "auto" and self.call_format else ()

    def _check_schemas(self) -> None:
        for i, function in enumerate(self._functions):
            where = f"tools[{i}].function.parameters"
            if self.name not in (None, function["name"]):
                continue
            try:
                StrictSchema(arguments_schema(function), no_additional_properties=False)
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: {error}", param=where) from error
            except RecursionError:
                pass  # the engine rejects the schema for its depth

    @property
    def _functions(self) -> list[dict[str, Any]]:
        return [tool["function"] for tool in self.tools]


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    mode: Mode | None,
    name: str | None = None,
    *,
    parallel: bool | None,
    settings: ToolSettings,
) -> ToolUse:
    """Check `tools` and `tool_choice` of a request. `mode` None: it has no tool_choice. Raises InvalidRequest."""
    if not tools:
        if mode in (None, "none") or (mode == "auto" and tools is not None):
            return ToolUse()
        raise InvalidRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    names = [_checked_name(tool["function"], f"tools[{i}].function") for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise InvalidRequest(f"tools has two functions with the name {repeated!r}: rename one.", param="tools")
    if mode == "named" and name not in names:
        message = f"tool_choice names {name!r}, which is not in tools: {', '.join(names)}."
        raise InvalidRequest(message, param="tool_choice")
    mode = mode or "auto"
    if mode == "auto" and not (settings.allows_auto and settings.parser):
        raise InvalidRequest(AUTO_IS_OFF, param="tool_choice")
    return ToolUse(
        mode=mode,
        tools=tuple(dict(tool) for tool in tools),
        name=name,
        one_call_only=parallel is False,
        call_format=TOOL_PARSERS[settings.parser] if settings.parser else None,
    )


def _checked_name(function: Mapping[str, Any], where: str) -> str:
    name: str = function["name"]
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.name must be {_NAME_RULE}; got {name[:200]!r}.", param=f"{where}.name")
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        message = f'{where}.parameters must be a schema of type "object"; got {str(kind)[:200]!r}.'
        raise InvalidRequest(message, param=f"{where}.parameters")
    return name
