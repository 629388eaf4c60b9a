"""What an answer is made of, in the order in which the model says it: text, reasoning, and calls of tools.

A stream shows parts as they come; a plain answer shows them joined. Cutting a text elsewhere never changes the joined
parts: that is the law of everything that makes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Text | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Joined:
    """`text` and `reasoning` are None where the model said none."""

    text: str | None
    reasoning: str | None
    calls: list[Call]


def merge(parts: Iterable[Part]) -> list[Part]:
    """Neighbours that can be one become one."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, CallStart) or last is None or not _continues(last, part):
            merged.append(part)
        else:
            assert not isinstance(last, CallStart)
            merged[-1] = replace(last, text=last.text + part.text)
    return merged


def join(parts: Iterable[Part]) -> Joined:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Text(text):
                texts.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(_, id, name):
                calls.append(Call(id, name))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return Joined("".join(texts) or None, "".join(reasoning) or None, calls)


def _continues(last: Part, part: Part) -> bool:
    if isinstance(last, CallArguments) and isinstance(part, CallArguments):
        return last.index == part.index
    return type(last) is type(part) and not isinstance(part, CallArguments)
