"""`BaseResponseWriter`: writes a response from a generation, whole or as chunks, for chat and text completions.

A subclass builds the structs of a whole choice and of a chunk, which msgspec encodes: a streamed token costs one small
struct, one encode and one send.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from octavo_server.api.answer_state import AnswerState, ChoiceState
from octavo_server.api.context import ApiContext, ResponseMeta
from octavo_server.api.generation import Generation
from octavo_server.openai.answer import Answer
from octavo_server.openai.fields import GenerationFields
from octavo_server.openai.sse import frame


class BaseResponseWriter(ABC):
    """Writes one response: call either `body` or `frames`, once."""

    def __init__(
        self, context: ApiContext, meta: ResponseMeta, request: GenerationFields, generation: Generation
    ) -> None:
        self.meta = meta
        self.codec = context.client.frontend.tokenizer
        self.generation = generation
        self.state = AnswerState(len(generation.prompts), generation.params.n, generation.num_prompt_tokens)
        self.returns_ids = bool(request.return_token_ids)
        asked = request.return_tokens_as_token_ids
        self.writes_token_ids = context.config.return_tokens_as_token_ids if asked is None else asked
        self._stream_interval = max(context.config.stream_interval, request.stream_interval or 1)
        self._reports_times = context.config.enable_per_request_metrics
        options = request.stream_options
        self._ends_with_usage = context.config.enable_force_include_usage or bool(options and options.include_usage)
        self.usage_everywhere = context.config.enable_force_include_usage or (
            self._ends_with_usage and bool(options and options.continuous_usage_stats)
        )

    async def body(self) -> bytes:
        with self.generation.reserve_answer() as reservation:
            await self.generation.add_all(self.state.add, reservation)
            response = self.full_response()
            if self._reports_times:
                response.metrics = self.state.latest.times or None
            return msgspec.json.encode(response)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream: each item holds the frames for one engine output."""
        opening = self.opening()
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                advanced = self.state.add(delta)
                written = b"".join([self._write(choice) for choice in advanced if choice.is_due(self._stream_interval)])
                if opening or written:
                    yield opening + written
                    opening = b""
        if self._ends_with_usage:
            last = self.chunk_of([])
            last.usage = self.state.usage()
            yield frame(last)

    def _write(self, choice: ChoiceState) -> bytes:
        chunks = self.chunks(choice)
        if self.usage_everywhere:
            for chunk in chunks:
                chunk.usage = self.state.usage()
        if choice.finish_reason is not None:
            chunks[-1].system_fingerprint = self.meta.fingerprint
            if self._reports_times:
                chunks[-1].metrics = choice.times
        choice.mark_written()
        return frame(chunks[0]) if len(chunks) == 1 else b"".join(map(frame, chunks))

    def opening(self) -> bytes:
        """Frames to send before the first text of a stream."""
        return b""

    @abstractmethod
    def full_response(self) -> Answer: ...

    @abstractmethod
    def chunks(self, choice: ChoiceState) -> Sequence[Answer]:
        """Chunks for the part of a choice that has not been written yet; at least one."""

    @abstractmethod
    def chunk_of(self, choices: list[Any]) -> Answer:
        """Make a chunk with these choices, or with none."""
