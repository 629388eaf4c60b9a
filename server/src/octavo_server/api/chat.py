"""`POST /v1/chat/completions`: render the conversation, generate, write the answer whole or as chunks."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from octavo_engine.wire.errors import InvalidRequest
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.choice import Choice
from octavo_server.api.context import ApiContext, Head, context_of, read_generation
from octavo_server.api.generation import Generation, PromptInput
from octavo_server.api.openapi import accepts
from octavo_server.api.watched import EventStream, JsonReply
from octavo_server.api.writer import AnswerWriter
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

router = APIRouter()

#: Arguments of the template's renderer that `chat_template_kwargs` may not replace.
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@router.post(
    "/v1/chat/completions",
    **accepts(ChatCompletionRequest, "Answer a conversation", answer=ChatCompletion, streams=True),
)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    head, body, generation = await read_chat(request)
    writer = ChatWriter(context, head, body, generation)
    if body.stream:
        return EventStream(context.in_flight, head.id, writer.frames())
    return JsonReply(context.in_flight, head.id, writer.body)


async def read_chat(request: Request) -> tuple[Head, ChatCompletionRequest, Generation]:
    """What the body asks for, ready to run. Raises every refusal but those of the engine."""
    arrival_s = time.monotonic()
    context = context_of(request)
    body = await read_generation(request, ChatCompletionRequest)
    head = context.head("chatcmpl", request, body)
    prompt = await render_chat(context, body)
    params = body.sampling_params(
        context.client.default_sampling_params,
        max_tokens=_output_limit(context, body, prompt),
        logprobs=body.num_logprobs,
    )
    return head, body, context.generation(head, body, [prompt], params, arrival_s)


def _output_limit(context: ApiContext, body: ChatCompletionRequest, prompt: PromptInput) -> int | None:
    """What the request asks for; else the model's own default, as far as there is room; else all the room."""
    default = context.client.default_sampling_params.get("max_tokens")
    if body.output_limit is not None or default is None:
        return body.output_limit
    return max(1, min(int(default), context.client.max_model_len - len(prompt.token_ids)))


async def render_chat(context: ApiContext, body: ChatCompletionRequest) -> PromptInput:
    text = await asyncio.to_thread(render_messages, context, body)
    ids = await context.encode_prompt(text, add_special_tokens=bool(body.add_special_tokens))
    return PromptInput(token_ids=ids, text=text)


def render_messages(context: ApiContext, body: ChatCompletionRequest) -> str:
    template = context.client.chat_template
    if template is None:
        message = "This model has no chat template: start the server with --chat-template, or use /v1/completions."
        raise InvalidRequest(message, param="messages")
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return template.render(
        body.conversation(),
        add_generation_prompt=generates,
        continue_final_message=continues,
        **_template_kwargs(body),
    )


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    kwargs: Mapping[str, Any] = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise InvalidRequest(f"chat_template_kwargs can't set {', '.join(taken)}.", param="chat_template_kwargs")
    extra = body.model_extra or {}
    named = {name: extra[name] for name in ("documents", "reasoning_effort") if extra.get(name) is not None}
    return {**named, **kwargs}


class ChatWriter(AnswerWriter):
    def __init__(self, context: ApiContext, head: Head, request: ChatCompletionRequest, generation: Generation) -> None:
        super().__init__(context, head, request, generation)
        self._role = context.config.response_role
        self._wants_logprobs = bool(request.logprobs)
        as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = LogprobWriter(self.codec, num_top=request.top_logprobs or 0, as_ids=as_ids)
        for choice in self.tally.choices:
            choice.text = request.echoed

    def whole(self) -> ChatCompletion:
        head, prompt_logprobs = self.head, self.tally.choices[0].prompt_logprobs
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._whole_choice(choice) for choice in self.tally.choices],
            usage=self.tally.usage(),
            system_fingerprint=head.fingerprint,
            prompt_logprobs=UNSET if prompt_logprobs is None else prompt_list(prompt_logprobs, self.codec),
            prompt_token_ids=self._prompt_token_ids(),
        )

    def opening(self) -> bytes:
        """One chunk a choice that names the role."""
        roles = (ChunkChoice(choice.index, DeltaMessage("", self._role)) for choice in self.tally.choices)
        chunks = [self._chunk([role]) for role in roles]
        chunks[0].prompt_token_ids = self._prompt_token_ids()
        if self.usage_everywhere:
            for chunk in chunks:
                chunk.usage = self.tally.usage()
        return b"".join(frame(chunk) for chunk in chunks)

    def chunk(self, choice: Choice) -> ChatCompletionChunk:
        written = ChunkChoice(choice.index, DeltaMessage(choice.text), self._choice_logprobs(choice))
        if choice.finish_reason is not None:
            written.finish_reason, written.stop_reason = choice.finish_reason, choice.stop_reason
        if self.returns_ids:
            written.token_ids = choice.token_ids
        return self._chunk([written])

    def usage_chunk(self) -> ChatCompletionChunk:
        chunk = self._chunk([])
        chunk.usage = self.tally.usage()
        return chunk

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        head = self.head
        return ChatCompletionChunk(id=head.id, created=head.created, model=head.model, choices=choices)

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            choice.index,
            AnswerMessage(self._role, choice.text),
            self._choice_logprobs(choice),
            choice.finish_reason,
            choice.stop_reason,
            choice.token_ids if self.returns_ids else UNSET,
        )

    def _choice_logprobs(self, choice: Choice) -> ChatLogprobs | None:
        return self._logprobs.chat(choice.logprobs) if self._wants_logprobs else None

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.generation.prompts[0].token_ids if self.returns_ids else UNSET
