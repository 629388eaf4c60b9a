"""Writes a chat response, whole or as chunks. An answer with reasoning or calls gets one chunk per event."""

from msgspec import UNSET

from octavo_server.api.answer_state import ChoiceState
from octavo_server.api.context import ApiContext, ResponseMeta
from octavo_server.api.generation import Generation
from octavo_server.api.writer import BaseResponseWriter
from octavo_server.openai.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    DeltaMessage,
)
from octavo_server.openai.logprobs import LogprobWriter, prompt_list
from octavo_server.openai.sse import frame
from octavo_server.openai.tools import (
    CalledCustomTool,
    CalledCustomToolDelta,
    CalledFunction,
    CalledFunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from octavo_server.output_parsing.config import OutputParserConfig
from octavo_server.output_parsing.events import (
    OutputEvent,
    ParsedToolCall,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    join_events,
    merge_adjacent,
)


class ChatWriter(BaseResponseWriter):
    def __init__(
        self,
        context: ApiContext,
        meta: ResponseMeta,
        request: ChatCompletionRequest,
        generation: Generation,
        *,
        output_parsing: OutputParserConfig,
    ) -> None:
        super().__init__(context, meta, request, generation)
        self._role = context.config.response_role
        self._first_text = None if output_parsing.tools.mode == "named" else ""
        self._wants_logprobs = bool(request.logprobs)
        self._logprobs = LogprobWriter(self.codec, num_top=request.num_top_logprobs, as_ids=self.writes_token_ids)
        for choice in self.state.choices:
            choice.parser = output_parsing.new_parser(self.codec.token_id)
            if choice.parser is None:
                choice.text = request.echoed
            elif request.echoed:
                choice.parts = [TextDelta(request.echoed)]

    def full_response(self) -> ChatCompletion:
        meta, prompt_logprobs = self.meta, self.state.choices[0].prompt_logprobs
        return ChatCompletion(
            id=meta.id,
            created=meta.created,
            model=meta.model,
            choices=[self._full_choice(choice) for choice in self.state.choices],
            usage=self.state.usage(),
            system_fingerprint=meta.fingerprint,
            prompt_logprobs=None if prompt_logprobs is None else prompt_list(prompt_logprobs),
            prompt_token_ids=self._prompt_token_ids(),
        )

    def opening(self) -> bytes:
        """First frames of a stream: for each choice one chunk with the role."""
        roles = (ChunkChoice(choice.index, DeltaMessage(self._first_text, self._role)) for choice in self.state.choices)
        chunks = [self.chunk_of([role]) for role in roles]
        chunks[0].prompt_token_ids = self._prompt_token_ids()
        if self.usage_everywhere:
            for chunk in chunks:
                chunk.usage = self.state.usage()
        return b"".join(frame(chunk) for chunk in chunks)

    def chunks(self, choice: ChoiceState) -> list[ChatCompletionChunk]:
        """Chunks for the unwritten events of a choice; the last one has the token ids and log-probabilities of all."""
        if choice.parser is None:
            deltas = [DeltaMessage(choice.text)]
        else:
            deltas = [_delta(part) for part in merge_adjacent(choice.parts)] or [DeltaMessage()]
        chunks = [self.chunk_of([ChunkChoice(choice.index, delta)]) for delta in deltas]
        last = chunks[-1].choices[0]
        if self._wants_logprobs:
            last.logprobs = self._choice_logprobs(choice)
        if choice.finish_reason is not None:
            last.finish_reason, last.stop_reason = choice.finish_reason, choice.stop_reason
        for chunk in chunks:
            chunk.choices[0].token_ids = None
        if self.returns_ids:
            last.token_ids = choice.token_ids
        return chunks

    def chunk_of(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        meta = self.meta
        return ChatCompletionChunk(id=meta.id, created=meta.created, model=meta.model, choices=choices)

    def _full_choice(self, choice: ChoiceState) -> ChatChoice:
        return ChatChoice(
            choice.index,
            self._message(choice),
            self._choice_logprobs(choice),
            choice.finish_reason,
            choice.stop_reason,
            choice.token_ids if self.returns_ids else None,
        )

    def _message(self, choice: ChoiceState) -> AnswerMessage:
        if choice.parser is None:
            return AnswerMessage(self._role, choice.text)
        joined = join_events(choice.parts)
        calls = [_whole_call(call) for call in joined.calls]
        text = joined.text if calls or joined.reasoning else joined.text or ""
        message = AnswerMessage(self._role, text, tool_calls=calls or UNSET)
        if choice.parser.emits_reasoning:
            message.reasoning = message.reasoning_content = joined.reasoning
        return message

    def _choice_logprobs(self, choice: ChoiceState) -> ChatLogprobs | None:
        return self._logprobs.chat(choice.logprobs) if self._wants_logprobs else None

    def _prompt_token_ids(self) -> list[int] | None:
        return self.generation.prompts[0].token_ids if self.returns_ids else None


def _delta(part: OutputEvent) -> DeltaMessage:
    match part:
        case TextDelta(text):
            return DeltaMessage(text)
        case ReasoningDelta(text):
            return DeltaMessage(reasoning=text, reasoning_content=text)
        case ToolCallStart(index, id, name, is_custom):
            if is_custom:
                call = ToolCallDelta(index, id=id, type="custom", custom=CalledCustomToolDelta("", name))
            else:
                call = ToolCallDelta(index, CalledFunctionDelta("", name), id, "function")
            return DeltaMessage(tool_calls=[call])
        case ToolCallArguments(index, text, is_custom):
            if is_custom:
                return DeltaMessage(tool_calls=[ToolCallDelta(index, custom=CalledCustomToolDelta(text))])
            return DeltaMessage(tool_calls=[ToolCallDelta(index, CalledFunctionDelta(text))])


def _whole_call(call: ParsedToolCall) -> ToolCall:
    if call.is_custom:
        return ToolCall(call.id, type="custom", custom=CalledCustomTool(call.name, call.arguments))
    return ToolCall(call.id, CalledFunction(call.name, call.arguments))
