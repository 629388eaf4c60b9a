"""Writes a response of `/v1/messages` from a generation, whole or as a stream of named events."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import msgspec

from octavo_server.anthropic.answer import (
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    StopReason,
    StreamEvent,
    message_usage,
)
from octavo_server.api.answer_state import AnswerState
from octavo_server.api.chat import ChatTurn
from octavo_server.api.context import ApiContext
from octavo_server.api.dialects.messages_output import BlockStream, whole_blocks
from octavo_server.openai.errors import GenerationFailed
from octavo_server.openai.sse import named_frame
from octavo_server.output_parsing.events import OutputEvent, TextDelta, ToolCallStart, merge_adjacent


class MessagesWriter:
    """Used once: either `body` or `frames`."""

    def __init__(self, context: ApiContext, turn: ChatTurn) -> None:
        self._meta = turn.meta
        self._generation = turn.generation
        self.state = AnswerState(1, 1, turn.generation.num_prompt_tokens)
        self._choice = self.state.choices[0]
        self._choice.parser = turn.output_parsing.new_parser(context.client.tokenizer.token_id)
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
        is_full = self._generation.num_prompt_tokens + num_tokens >= self._generation.client.max_model_len
        return is_full and (allowed is None or num_tokens < allowed)


def _framed(events: Iterable[StreamEvent]) -> bytes:
    return b"".join(named_frame(event.type, event) for event in events)
