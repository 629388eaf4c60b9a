"""Events of a parsed answer, in the order in which the model generates them: text, reasoning and tool calls.

A streamed response sends each event; a plain response joins all events. Every parser must ensure that the joined events
do not depend on how the text was split into chunks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next fragment of the JSON text of a call's arguments; for a custom tool, of its input."""

    index: int
    text: str
    is_custom: bool = False


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(slots=True)
class ParsedToolCall:
    id: str
    name: str
    is_custom: bool = False
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """`text` and `reasoning` are None if the model generated none."""

    text: str | None
    reasoning: str | None
    calls: list[ParsedToolCall]


def merge_adjacent(parts: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Merge neighbouring events of the same kind: text, reasoning, or arguments of the same call."""
    merged: list[OutputEvent] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, ToolCallStart) or last is None or not _continues(last, part):
            merged.append(part)
        else:
            assert not isinstance(last, ToolCallStart)
            merged[-1] = replace(last, text=last.text + part.text)
    return merged


def join_events(parts: Iterable[OutputEvent]) -> ParsedOutput:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ParsedToolCall] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(_, id, name, is_custom):
                calls.append(ParsedToolCall(id, name, is_custom))
                arguments.append([])
            case ToolCallArguments(index, text):
                arguments[index].append(text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return ParsedOutput("".join(texts) or None, "".join(reasoning) or None, calls)


def _continues(last: OutputEvent, part: OutputEvent) -> bool:
    if isinstance(last, ToolCallArguments) and isinstance(part, ToolCallArguments):
        return last.index == part.index
    return type(last) is type(part) and not isinstance(part, ToolCallArguments)
