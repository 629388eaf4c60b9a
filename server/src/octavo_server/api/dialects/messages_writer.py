"""Writes a response of `/v1/messages` from a generation, whole or as a stream of named events."""

import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from octavo_server.anthropic.answer import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Fragment,
    InputFragment,
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    Ping,
    SignatureFragment,
    StopDelta,
    StopReason,
    StreamEvent,
    TextBlock,
    TextFragment,
    ThinkingBlock,
    ThinkingFragment,
    ToolUseBlock,
    message_usage,
)
from octavo_server.api.answer_state import AnswerState
from octavo_server.api.chat import ChatTurn
from octavo_server.api.context import ApiContext
from octavo_server.openai.errors import GenerationFailed
from octavo_server.openai.sse import named_frame
from octavo_server.output_parsing.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_adjacent,
)


class MessagesWriter:
    """Used once: either `body` or `frames`."""

    def __init__(self, context: ApiContext, turn: ChatTurn) -> None:
        self._meta = turn.meta
        self._generation = turn.generation
        self.state = AnswerState(1, 1, turn.generation.num_prompt_tokens)
        self._choice = self.state.choices[0]
        self._choice.parser = turn.output_parsing.new_parser(context.client.frontend.tokenizer.token_id)
        self._blocks = BlockStream()

    async def body(self) -> bytes:
        with self._generation.reserve_answer() as reservation:
            await self._generation.add_all(self.state.add, reservation)
            parts = self._take_parts()
            message = self._message()
            message.content = whole_blocks(parts)
            stop = self._stop(has_calls=any(isinstance(part, ToolCallStart) for part in parts))
            message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
            return msgspec.json.encode(message)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Each item holds the frames of one engine output. The first output has the number of cached tokens."""
        has_opened = False
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                self.state.add(delta)
                written = _framed(event for part in self._take_parts() for event in self._blocks.add(part))
                if not has_opened:
                    has_opened = True
                    written = _framed(self._opening()) + written
                if written:
                    yield written
        stop = MessageDelta(self._stop(has_calls=self._blocks.has_calls), message_usage(self.state.usage()))
        yield _framed([*self._blocks.close(), stop, MessageStop()])

    def _opening(self) -> list[StreamEvent]:
        message = self._message()
        message.usage.output_tokens = 0
        return [MessageStart(message), Ping()]

    def _take_parts(self) -> list[OutputEvent]:
        """Events that haven't been written yet."""
        choice = self._choice
        if choice.parser is not None:
            parts = merge_adjacent(choice.parts)
        else:
            parts = [TextDelta(choice.text)] if choice.text else []
        choice.mark_written()
        return parts

    def _message(self) -> MessageObject:
        return MessageObject(id=self._meta.id, model=self._meta.model, usage=message_usage(self.state.usage()))

    def _stop(self, *, has_calls: bool) -> StopDelta:
        """Reason of the end. Raises GenerationFailed if the request was aborted."""
        reason, stop = self._choice.finish_reason, self._choice.stop_reason
        if reason == "abort":
            raise GenerationFailed("The request was aborted: send it again.")
        if reason == "length":
            return StopDelta("model_context_window_exceeded" if self._has_filled_context else "max_tokens", None)
        if reason == "stop" and isinstance(stop, str):
            return StopDelta("stop_sequence", stop)
        ended: StopReason = "tool_use" if has_calls else "end_turn"
        return StopDelta(ended, None)

    @property
    def _has_filled_context(self) -> bool:
        """True if the answer has fewer tokens than were allowed, but no more fit the context."""
        num_tokens, allowed = self._choice.num_tokens, self._generation.params.max_tokens
        is_full = self._generation.num_prompt_tokens + num_tokens >= self._generation.client.frontend.max_model_len
        return is_full and (allowed is None or num_tokens < allowed)


def _framed(events: Iterable[StreamEvent]) -> bytes:
    return b"".join(named_frame(event.type, event) for event in events)


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
