"""What an answer is made of, in the order in which the model says it: text, reasoning, and calls of tools.

A stream shows parts as they come; a plain answer shows them joined. Cutting a text elsewhere never changes the joined
parts: that is the law of everything that makes them.
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


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(slots=True)
class ParsedToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """`text` and `reasoning` are None where the model said none."""

    text: str | None
    reasoning: str | None
    calls: list[ParsedToolCall]


def merge_adjacent(parts: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Neighbours that can be one become one."""
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
            case ToolCallStart(_, id, name):
                calls.append(ParsedToolCall(id, name))
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
