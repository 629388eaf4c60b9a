"""`ToolUse`: the checked `tools` and `tool_choice` of one request, and their effect on grammar and output parser."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo_engine.settings.declare import Declared, setting
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs

from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_formats import KEY, TOOL_PARSERS, ToolCallFormat, new_call_id
from octavo_server.output_parsing.tool_call_parser import ToolCallParser
from octavo_server.output_parsing.tool_grammar import (
    CallNotation,
    arguments_part,
    begins_as_call,
    calls_shape,
    json_call,
)

AUTO_IS_OFF = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NAME_RULE = "1 to 128 characters of letters, digits, '_', '-' and '.'"

Mode = Literal["none", "auto", "required", "named"]


class RequiredToolParser(ToolCallParser):
    """Parses an answer that a grammar (`tool_grammar`) forces to be a JSON list of calls: `tool_choice` "required"."""

    notations = (CallNotation(before='"[" ws', call=json_call("parameters"), between='ws "," ws', after='ws "]"'),)

    def parse_calls(self) -> Steps[None]:
        yield from self.skip_space()
        if not (yield from self.parse_json_calls()):
            self._pos = self._kept
        yield from self.emit_rest_as_text()


class NamedToolParser(ToolCallParser):
    """Parses an answer that a grammar forces to be the JSON object of the arguments of the tool `name`."""

    def __init__(self, new_id: Callable[[], str], name: str) -> None:
        super().__init__(new_id)
        self._name = name

    def parse_calls(self) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self._has_arguments()):
            self.start_call(self._name)
            yield from self.parse_arguments()
        yield from self.emit_rest_as_text()

    def _has_arguments(self) -> Steps[bool]:
        """False if the text ends at the opening brace: an answer of one token is no call."""
        start = self._pos
        yield from self.accept_token("{")
        yield from self.skip_space()
        ahead = yield from self.peek_char()
        self._pos = start
        return bool(ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings(Declared):
    """Settings of tool calls."""

    enable_auto_tool_choice: bool = setting(
        False,
        "Let the model decide whether to call a tool (tool_choice: auto); needs --tool-call-parser.",
        group="tools and reasoning",
    )
    tool_call_parser: str | None = setting(
        None, f"Format of the model's tool calls: {', '.join(TOOL_PARSERS)}.", metavar="NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """`tools` have the form that chat templates expect: `{"type": "function", "function": {...}}`. `places`: the
    client's name of each tool's schema. `name`: function that must be called, in mode "named". `answer`: the format of
    an answer without calls, in mode "auto"."""

    mode: Mode = "none"
    tools: tuple[dict[str, Any], ...] = ()
    places: tuple[str, ...] = ()
    name: str | None = None
    one_call_only: bool = False
    call_format: ToolCallFormat | None = None
    answer: StructuredOutputs | None = None

    def constrain(self, params: SamplingParams, special_id: Callable[[str], int | None]) -> None:
        """Set the structured output that `mode` and the format demand. `special_id`: id of a special token's text."""
        parts = {f["name"]: arguments_part(f, place) for f, place in zip(self._functions, self.places, strict=True)}
        if self.name is not None:
            params.structured_outputs = StructuredOutputs(**parts[self.name])
        elif self._notations:
            params.structured_outputs = calls_shape(
                self._notations,
                parts,
                one_call_only=self.one_call_only,
                answer=self.answer,
                special_ids={text: i for text in self.markers if (i := special_id(text)) is not None},
            )

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
            beginnings = None if self.answer is None else frozenset(n.marker or "{" for n in self._notations)
            tools = {f["name"]: f.get("parameters") or {} for f in self._functions}
            return self.call_format.parser_type(new_id, tools, beginnings)
        return None

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that the parser needs in the text even if they are special tokens."""
        return self.call_format.parser_type.markers if self.mode == "auto" and self.call_format else ()

    @property
    def _notations(self) -> tuple[CallNotation, ...]:
        """Notations of calls in the grammar; those without a marker only if no other answer can look like a call."""
        if self.mode == "required":
            return RequiredToolParser.notations
        if self.mode != "auto" or self.answer is None or self.call_format is None:
            return ()
        is_bare_allowed = not begins_as_call(self.answer, KEY)
        return tuple(n for n in self.call_format.parser_type.notations if n.marker or is_bare_allowed)

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
    places: Sequence[str] | None = None,
    answer: StructuredOutputs | None = None,
) -> ToolUse:
    """Check `tools` and `tool_choice` of a request. `mode` None: it has no tool_choice. `places`: the client's name of
    each tool's schema, for a client of another dialect than chat. `answer`: the requested format, if any: a forced call
    replaces it, and it replaces calls whose grammar is unknown. Raises InvalidRequest."""
    if not tools:
        if mode in (None, "none", "auto"):
            return ToolUse()
        raise InvalidRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    places = places or [f"tools[{i}].function.parameters" for i in range(len(tools))]
    names = [_checked_name(tool["function"], place) for tool, place in zip(tools, places, strict=True)]
    if len(set(names)) < len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise InvalidRequest(f"tools has two functions with the name {repeated!r}: rename one.", param="tools")
    if mode == "named" and name not in names:
        message = f"tool_choice names {name!r}, which is not in tools: {', '.join(names)}."
        raise InvalidRequest(message, param="tool_choice")
    mode = mode or "auto"
    call_format = TOOL_PARSERS[settings.tool_call_parser] if settings.tool_call_parser else None
    known = call_format.parser_type if call_format and settings.enable_auto_tool_choice else None
    if mode == "auto" and known is None and answer is None:
        raise InvalidRequest(AUTO_IS_OFF, param="tool_choice")
    if mode == "auto" and answer is not None and not (known and known.notations):
        mode = "none"
    return ToolUse(
        mode=mode,
        tools=tuple(dict(tool) for tool in tools),
        places=tuple(places),
        name=name,
        one_call_only=parallel is False,
        call_format=call_format,
        answer=answer if mode == "auto" else None,
    )


def _checked_name(function: Mapping[str, Any], place: str) -> str:
    name: str = function["name"]
    if not _NAME.fullmatch(name):
        where = f"{place.rpartition('.')[0]}.name"
        raise InvalidRequest(f"{where} must be {_NAME_RULE}; got {name[:200]!r}.", param=where)
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        message = f'{place} must be a schema of type "object"; got {str(kind)[:200]!r}.'
        raise InvalidRequest(message, param=place)
    return name
