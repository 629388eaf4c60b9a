"""`POST /v1/chat/completions`: renders the conversation, generates, and writes the response whole or as chunks."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from octavo_engine.frontend.request_builder import ResolvedParams
from octavo_engine.text.template import ChatTemplate, special_tokens
from octavo_engine.wire.errors import InvalidRequest
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.chat_writer import ChatWriter
from octavo_server.api.context import ApiContext, ResponseMeta, context_of
from octavo_server.api.generation import Generation, PromptInput
from octavo_server.api.load_header import with_load
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import held_body, parse_generation
from octavo_server.http.responses import CancellableJSONResponse, SSEResponse
from octavo_server.openai.chat import ChatCompletion, ChatCompletionRequest
from octavo_server.openai.rendering import (
    render_conversation,
    render_options,
    template_kwargs,
    without_oldest,
)
from octavo_server.output_parsing.config import OutputParserConfig
from octavo_server.output_parsing.reasoning_formats import REASONING_PARSERS, ReasoningStart
from octavo_server.output_parsing.tool_use import ToolUse

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **accepts(ChatCompletionRequest, "Answer a conversation", answer=ChatCompletion, streams=True),
)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    turn = await read_chat(request)
    writer = ChatWriter(context, turn.meta, turn.body, turn.generation, output_parsing=turn.output_parsing)
    if turn.body.stream:
        return SSEResponse(context.in_flight, turn.meta.id, writer.frames(), writer.state.headers)
    headers = with_load(request, context.client, writer.state.headers)
    return CancellableJSONResponse(context.in_flight, turn.meta.id, writer.body, headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A parsed and rendered chat request with its generation, which has not started."""

    meta: ResponseMeta
    body: ChatCompletionRequest
    generation: Generation
    output_parsing: OutputParserConfig


async def read_chat(request: Request) -> ChatTurn:
    """Read, check and render a request, without running it. Raises every error that does not come from the engine."""
    arrival_s = time.monotonic()
    context = context_of(request)
    async with held_body(request, partial(parse_generation, context, ChatCompletionRequest)) as (body, num_bytes):
        meta = context.new_response_meta("chatcmpl-", request, body)
        return await chat_turn(context, meta, body, arrival_s=arrival_s, num_bytes=num_bytes)


async def chat_turn(
    context: ApiContext, meta: ResponseMeta, body: ChatCompletionRequest, *, arrival_s: float, num_bytes: int
) -> ChatTurn:
    """Render and check a chat request in one call to a thread, as each switch adds to the time to first token."""
    chat = await context.threads.run(lambda: prepare(context, body, share(context, body)), num_bytes=num_bytes)
    generation = context.new_generation(meta, body, [chat.prompt], chat.resolved, arrival_s)
    return ChatTurn(meta=meta, body=body, generation=generation, output_parsing=chat.output_parsing)


@dataclass(frozen=True, slots=True)
class SharedFields:
    """The checked part of a chat request that its messages don't decide: all conversations of a batch share it."""

    tools: ToolUse
    resolved: ResolvedParams


@dataclass(frozen=True, slots=True)
class PreparedChat:
    prompt: PromptInput
    resolved: ResolvedParams
    output_parsing: OutputParserConfig


def share(context: ApiContext, body: ChatCompletionRequest) -> SharedFields:
    """Check and resolve all fields but the messages, in a thread. Raises InvalidRequest."""
    params = body.sampling_params(
        context.client.frontend.default_sampling_params,
        max_tokens=_output_limit(context, body),
        logprobs=body.num_logprobs,
    )
    tools = body.tool_use(context.config.tools, params.structured_outputs)
    tools.constrain(params, context.client.frontend.tokenizer.special_id)
    return SharedFields(tools, context.client.frontend.resolve(params, priority=body.priority or 0))


def prepare(context: ApiContext, body: ChatCompletionRequest, shared: SharedFields) -> PreparedChat:
    """Render one conversation, in a thread. Raises InvalidRequest."""
    prompt = _prompt_of(context, body)
    output_parsing = OutputParserConfig(
        tools=shared.tools,
        custom_tools=body.custom_tools,
        reasoning=_reasoning_start(context, body, prompt),
        shows_reasoning=body.include_reasoning is not False,
    )
    params = copy.copy(shared.resolved.params)
    output_parsing.apply(params, context.client.frontend.tokenizer.token_id)
    if prompt.images:
        body.drop_images()
    return PreparedChat(prompt, replace(shared.resolved, params=params), output_parsing)


def _reasoning_start(context: ApiContext, body: ChatCompletionRequest, prompt: PromptInput) -> ReasoningStart | None:
    name = context.config.reasoning_parser
    if name is None:
        return None
    continued = body.final_message_text if body.continue_final_message else ""
    kwargs = template_kwargs(body, context.render_defaults)
    return REASONING_PARSERS[name].reasoning_start(prompt.text or "", continued=continued, template_kwargs=kwargs)


def _output_limit(context: ApiContext, body: ChatCompletionRequest) -> int | None:
    """Most tokens of the answer: the request's limit; else the model's default; None without either, which stands for
    the whole free context. The generation cuts a limit to the free context."""
    default = context.client.frontend.default_sampling_params.get("max_tokens")
    return default if body.output_limit is None else body.output_limit


async def render_chat(context: ApiContext, body: ChatCompletionRequest, *, num_bytes: int) -> PromptInput:
    return await context.threads.run(partial(_prompt_of, context, body), num_bytes=num_bytes)


def fitted_chat(context: ApiContext, body: ChatCompletionRequest) -> ChatCompletionRequest:
    """Drop the oldest messages, in a thread, until the prompt fits the context."""
    return without_oldest(
        body, lambda chat: len(_prompt_of(context, chat).token_ids), context.client.frontend.max_model_len
    )


def _prompt_of(context: ApiContext, body: ChatCompletionRequest) -> PromptInput:
    template, options = _template_of(context, body), render_options(body, context.render_defaults)
    truncates, special = body.truncate_prompt_tokens is not None, options.add_special_tokens

    def render(messages: Sequence[dict[str, Any]]) -> str:
        text = render_conversation(template, list(messages), options)
        context.check_prompt(text, may_exceed=truncates)
        return text

    prompt = context.client.frontend.tokenize_messages(
        body.conversation(), render, add_special_tokens=special, mm_processor_kwargs=body.mm_processor_kwargs
    )
    prompt.check_uncut(body.truncate_prompt_tokens)
    ids = context.truncate(prompt.token_ids, body, is_framed=special)
    return PromptInput(token_ids=ids, text=prompt.text, images=prompt.images)


def _template_of(context: ApiContext, body: ChatCompletionRequest) -> ChatTemplate | None:
    """The request's chat template, else the model's. Raises InvalidRequest if the request's is not trusted or valid."""
    client = context.client
    if not body.chat_template:
        return client.frontend.chat_template
    if not context.config.trust_request_chat_template:
        message = "chat_template needs a server with --trust-request-chat-template: leave it out."
        raise InvalidRequest(message, param="chat_template")
    tokens = special_tokens(client.frontend.tokenizer_config, client.frontend.tokenizer)
    return ChatTemplate(
        body.chat_template,
        tokens,
        content_format=client.config.chat_template_content_format,
        image_token=client.frontend.images.token if client.frontend.images else None,
    )
