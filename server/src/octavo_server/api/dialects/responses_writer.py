"""Writes a response of `/v1/responses` from a generation, whole or as a stream of numbered events."""

import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import msgspec

from octavo_server.api.answer_state import AnswerState
from octavo_server.api.chat import ChatTurn
from octavo_server.api.context import ApiContext
from octavo_server.api.dialects.responses_output import ResponseOutput
from octavo_server.api.generation import GenerationDelta
from octavo_server.openai.chat import TokenLogprob
from octavo_server.openai.errors import GenerationFailed, describe
from octavo_server.openai.logprobs import LogprobWriter
from octavo_server.openai.responses import ResponsesRequest
from octavo_server.openai.responses_answer import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    RawMessage,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseStreamEvent,
    ResponseUsage,
)
from octavo_server.openai.sse import named_frame
from octavo_server.output_parsing.events import OutputEvent, TextDelta, merge_adjacent


class ResponsesWriter:
    """Writes one response: call either `body`, or `frames` and, if `frames` raises, `failure`. The writer doesn't keep
    the request, whose input may be large."""

    def __init__(self, context: ApiContext, request: ResponsesRequest, turn: ChatTurn) -> None:
        self._codec = codec = context.client.frontend.tokenizer
        self._echoed = request.echoed()
        self._wants_logprobs = request.wants_logprobs
        self._wants_messages = bool(request.enable_response_messages)
        self._output_ids: list[int] = []
        self._meta = turn.meta
        self._generation = turn.generation
        self.state = AnswerState(1, 1, turn.generation.num_prompt_tokens)
        self._choice = self.state.choices[0]
        self._choice.parser = turn.output_parsing.new_parser(codec.token_id)
        self._output = ResponseOutput(lambda kind: f"{kind}_{uuid.uuid4().hex}", request.namespaced_names())
        self._logprobs = LogprobWriter(
            codec, num_top=request.top_logprobs or 0, as_ids=context.config.return_tokens_as_token_ids
        )
        self._stream_interval = context.config.stream_interval
        self._sequence_number = 0

    async def body(self) -> bytes:
        with self._generation.reserve_answer() as reservation:
            await self._generation.add_all(self._add, reservation)
            self._advance()
            self._output.finish(is_complete=self._is_complete)
            return msgspec.json.encode(self._last())

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream: each item holds the frames for one engine output."""
        opening = self._framed([self._about("response.created"), self._about("response.in_progress")])
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                self._add(delta)
                is_due = self._choice.is_due(self._stream_interval)
                written = opening + self._framed(self._advance() if is_due else ())
                if written:
                    yield written
                    opening = b""
        closing = self._framed(self._output.finish(is_complete=self._is_complete))
        last = self._last()
        yield closing + self._framed([ResponseStreamEvent(type=f"response.{last.status}", response=last)])

    def failure(self, error: Exception) -> bytes:
        """Last frame of a stream that failed after it had started."""
        self._output.fail()
        response = self._response("failed")
        described = describe(error)
        response.error = ResponseError(described.code or "server_error", described.message)
        return self._framed([ResponseStreamEvent(type="response.failed", response=response)])

    def _add(self, delta: GenerationDelta) -> None:
        self.state.add(delta)
        if self._wants_messages:
            self._output_ids += [i for sequence in delta.output.outputs for i in sequence.token_ids]

    def _advance(self) -> list[ResponseStreamEvent]:
        """Stream events for the part of the choice that has not been written yet."""
        logprobs, parts = self._new_logprobs(), self._new_parts()
        self._choice.mark_written()
        events: list[ResponseStreamEvent] = []
        for part in parts:
            of_part: list[TokenLogprob] = []
            if isinstance(part, TextDelta):
                of_part, logprobs = logprobs, []
            events += self._output.add(part, of_part)
        return events

    def _new_parts(self) -> list[OutputEvent]:
        if self._choice.parser is not None:
            return merge_adjacent(self._choice.parts)
        return [TextDelta(self._choice.text)] if self._choice.text else []

    def _new_logprobs(self) -> list[TokenLogprob]:
        return self._logprobs.chat(self._choice.logprobs).content if self._wants_logprobs else []

    @property
    def _is_complete(self) -> bool:
        return self._choice.finish_reason != "length"

    def _last(self) -> ResponseObject:
        """The final response. Raises GenerationFailed if the request was aborted."""
        if self._choice.finish_reason == "abort":
            raise GenerationFailed("The request was aborted: send it again.")
        response = self._response("completed" if self._is_complete else "incomplete")
        response.usage = self._usage()
        if not self._is_complete:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        if self._wants_messages:
            (prompt,) = self._generation.prompts
            response.input_messages = [self._raw_message(prompt.token_ids)]
            response.output_messages = [self._raw_message(self._output_ids)]
        return response

    def _raw_message(self, ids: list[int]) -> RawMessage:
        return RawMessage(self._codec.decode(ids, skip_special_tokens=False), ids)

    def _about(self, kind: str) -> ResponseStreamEvent:
        return ResponseStreamEvent(type=kind, response=self._response("in_progress"))

    def _framed(self, events: Iterable[ResponseStreamEvent]) -> bytes:
        frames = []
        for event in events:
            event.sequence_number = self._sequence_number
            self._sequence_number += 1
            frames.append(named_frame(event.type, event))
        return b"".join(frames)

    def _response(self, status: ResponseStatus) -> ResponseObject:
        meta, params = self._meta, self._generation.params
        return ResponseObject(
            id=meta.id,
            created_at=meta.created,
            model=meta.model,
            status=status,
            output=self._output.items,
            temperature=params.temperature,
            top_p=params.top_p,
            **self._echoed,
        )

    def _usage(self) -> ResponseUsage:
        counted = self.state.usage()
        details = counted.completion_tokens_details
        return ResponseUsage(
            counted.prompt_tokens,
            InputDetails(counted.prompt_tokens_details.cached_tokens),
            counted.completion_tokens,
            OutputDetails(details.reasoning_tokens if details else 0),
            counted.total_tokens,
        )
