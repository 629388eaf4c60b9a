"""`POST /v1/chat/completions/batch`: several conversations in one request, with one choice for each, as in vLLM."""

import time
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.chat import prepare, share
from octavo_server.api.chat_writer import ChatWriter
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import held_body, parse_body
from octavo_server.http.responses import CancellableJSONResponse
from octavo_server.openai.chat import ChatCompletion, ChatCompletionRequest
from octavo_server.openai.chat_batch import BatchChatRequest
from octavo_server.openai.unsupported import refuse_unsupported

router = APIRouter()


@router.post(
    "/v1/chat/completions/batch", **accepts(BatchChatRequest, "Answer several conversations", answer=ChatCompletion)
)
async def create_chat_batch(request: Request) -> Response:
    arrival_s = time.monotonic()
    context = context_of(request)
    context.check_queue(request)
    async with held_body(request, partial(_parse, context)) as (bodies, num_bytes):
        meta = context.new_response_meta("chatcmpl-", request, bodies[0])
        run = partial(context.threads.run, num_bytes=num_bytes)
        shared = await run(partial(share, context, bodies[0]))
        chats = [await run(partial(prepare, context, body, shared)) for body in bodies]
    prompts = [replace(chat.prompt, resolved=chat.resolved) for chat in chats]
    generation = context.new_generation(meta, bodies[0], prompts, shared.resolved, arrival_s)
    writer = ChatWriter(context, meta, bodies[0], generation, output_parsing=chats[0].output_parsing)
    for choice, chat in zip(writer.state.choices, chats, strict=True):
        choice.parser = chat.output_parsing.new_parser(context.client.tokenizer.token_id)
    return CancellableJSONResponse(context.in_flight, meta.id, writer.body, writer.state.headers)


def _parse(context: ApiContext, raw: bytes) -> list[ChatCompletionRequest]:
    body = parse_body(context, BatchChatRequest, raw)
    context.resolve_model_name(body.model)
    refuse_unsupported(body)
    return body.conversations(context.config.limits)
