"""Anthropic's Messages API: `POST /v1/messages`, and `POST /v1/messages/count_tokens`, which only renders."""

import time
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.anthropic.answer import MessageObject, TokenCount
from octavo_server.anthropic.errors import MessagesErrorResponse, error_event
from octavo_server.anthropic.messages import CountTokensRequest, MessagesRequest
from octavo_server.anthropic.routes import COUNT_TOKENS, MESSAGES
from octavo_server.api.chat import ChatTurn, chat_turn, render_chat
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.dialects.messages_writer import MessagesWriter
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import held_body, parse_body
from octavo_server.http.in_flight import InFlight
from octavo_server.http.responses import CancellableJSONResponse, SSEResponse
from octavo_server.json_responses import json_reply
from octavo_server.openai.chat import ChatCompletionRequest

router = APIRouter()

Body = TypeVar("Body", bound=CountTokensRequest)


@router.post(
    MESSAGES,
    **accepts(
        MessagesRequest,
        "Answer a conversation in Anthropic's format",
        answer=MessageObject,
        streams=True,
        error=MessagesErrorResponse,
    ),
)
async def create_message(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    turn = await read_message(request)
    writer = MessagesWriter(context, turn)
    if turn.body.stream:
        return MessageStream(context.in_flight, turn.meta.id, writer)
    return CancellableJSONResponse(context.in_flight, turn.meta.id, writer.body, writer.state.headers)


async def read_message(request: Request) -> ChatTurn:
    """Read, check and render a request, without running it. Raises every error that does not come from the engine."""
    arrival_s = time.monotonic()
    context = context_of(request)
    async with held_body(request, partial(_parse, context, MessagesRequest)) as (chat, num_bytes):
        meta = context.new_response_meta("msg_", request, chat)
        return await chat_turn(context, meta, chat, arrival_s=arrival_s, num_bytes=num_bytes)


@router.post(
    COUNT_TOKENS,
    **accepts(
        CountTokensRequest, "Number of a conversation's prompt tokens", answer=TokenCount, error=MessagesErrorResponse
    ),
)
async def count_tokens(request: Request) -> Response:
    context = context_of(request)
    async with held_body(request, partial(_parse, context, CountTokensRequest)) as (chat, num_bytes):
        prompt = await render_chat(context, chat, num_bytes=num_bytes)
    return json_reply(TokenCount(len(prompt.token_ids)))


def _parse(context: ApiContext, kind: type[Body], raw: bytes) -> ChatCompletionRequest:
    body = parse_body(context, kind, raw)
    context.resolve_model_name(body.model)
    body.check()
    chat = body.as_chat()
    chat.check()
    return chat


class MessageStream(SSEResponse):
    """A stream that ends with `message_stop`, or with an `error` event after a failure; it has no `[DONE]`."""

    def __init__(self, in_flight: InFlight, request_id: str, writer: MessagesWriter) -> None:
        super().__init__(in_flight, request_id, writer.frames(), writer.state.headers)

    def _ending(self, error: Exception | None) -> bytes:
        return b"" if error is None else error_event(error)
