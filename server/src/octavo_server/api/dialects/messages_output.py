"""Content blocks of a message: the events that stream them, and the blocks of a whole response."""

import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from octavo_server.anthropic.answer import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Fragment,
    InputFragment,
    SignatureFragment,
    StreamEvent,
    TextBlock,
    TextFragment,
    ThinkingBlock,
    ThinkingFragment,
    ToolUseBlock,
)
from octavo_server.output_parsing.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart


class BlockStream:
    """Turns the events of an answer into stream events: one block at a time, numbered from 0."""

    def __init__(self) -> None:
        self.has_calls = False
        self._num_blocks = 0
        self._open: Block | None = None

    def add(self, part: OutputEvent) -> list[StreamEvent]:
        match part:
            case TextDelta(text):
                return self._continue(TextBlock(), TextFragment(text)) if text else []
            case ReasoningDelta(text):
                return self._continue(ThinkingBlock(), ThinkingFragment(text)) if text else []
            case ToolCallStart(_, id, name):
                self.has_calls = True
                return self._start(ToolUseBlock(id=id, name=name))
            case ToolCallArguments(_, text):
                return [self._delta(InputFragment(text))]

    def close(self) -> list[StreamEvent]:
        """End the open block, if any."""
        if self._open is None:
            return []
        signature = [self._delta(SignatureFragment(_signature()))] if isinstance(self._open, ThinkingBlock) else []
        self._open = None
        return [*signature, BlockStop(self._num_blocks - 1)]

    def _continue(self, block: Block, fragment: Fragment) -> list[StreamEvent]:
        started = [] if type(self._open) is type(block) else self._start(block)
        return [*started, self._delta(fragment)]

    def _start(self, block: Block) -> list[StreamEvent]:
        closed = self.close()
        self._open = block
        self._num_blocks += 1
        return [*closed, BlockStart(self._num_blocks - 1, block)]

    def _delta(self, fragment: Fragment) -> BlockDelta:
        return BlockDelta(self._num_blocks - 1, fragment)


def whole_blocks(parts: Iterable[OutputEvent]) -> list[Block]:
    """Blocks of a whole answer. `parts`: merged events."""
    blocks: list[Block] = []
    for part in parts:
        match part:
            case TextDelta(text):
                blocks.append(TextBlock(text=text))
            case ReasoningDelta(text):
                blocks.append(ThinkingBlock(thinking=text, signature=_signature()))
            case ToolCallStart(_, id, name):
                blocks.append(ToolUseBlock(id=id, name=name))
            case ToolCallArguments(_, text):
                call = blocks[-1]
                assert isinstance(call, ToolUseBlock)
                call.input = _input(text)
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """Arguments of a call; empty if the token limit has cut them."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _signature() -> str:
    return uuid.uuid4().hex
