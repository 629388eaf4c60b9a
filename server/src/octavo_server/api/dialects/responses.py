"""`POST /v1/responses`, without state: a response depends only on its request, and no response is stored."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.chat import ChatTurn, chat_turn, fitted_chat, render_chat
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.dialects.responses_writer import ResponsesWriter
from octavo_server.api.openapi import accepts, answers
from octavo_server.api.request_parsing import held_body, parse_body
from octavo_server.http.in_flight import InFlight
from octavo_server.http.responses import CancellableJSONResponse, SSEResponse
from octavo_server.json_responses import json_reply
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.errors import NotCompacted, NotStored
from octavo_server.openai.responses import ResponsesRequest
from octavo_server.openai.responses_answer import InputTokens, ResponseObject
from octavo_server.openai.unsupported import refuse_unsupported

router = APIRouter()
NOT_FOUND = (401, 404)


@router.post(
    "/v1/responses", **accepts(ResponsesRequest, "Answer a conversation of items", answer=ResponseObject, streams=True)
)
async def create_response(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    body, turn = await read_response(request)
    writer = ResponsesWriter(context, body, turn)
    if body.stream:
        return ResponseStream(context.in_flight, turn.meta.id, writer)
    return CancellableJSONResponse(context.in_flight, turn.meta.id, writer.body, writer.state.headers)


@router.post(
    "/v1/responses/input_tokens",
    **accepts(ResponsesRequest, "Number of a response's prompt tokens", answer=InputTokens),
)
async def count_input_tokens(request: Request) -> Response:
    context = context_of(request)
    async with _held(context, request) as (_, chat, num_bytes):
        prompt = await render_chat(context, chat, num_bytes=num_bytes)
    return json_reply(InputTokens(len(prompt.token_ids)))


async def read_response(request: Request) -> tuple[ResponsesRequest, ChatTurn]:
    """Read, check and render a request, without running it. Raises every error that does not come from the engine."""
    arrival_s = time.monotonic()
    context = context_of(request)
    async with _held(context, request) as (body, chat, num_bytes):
        meta = context.new_response_meta("resp_", request, chat)
        return body, await chat_turn(context, meta, chat, arrival_s=arrival_s, num_bytes=num_bytes)


@asynccontextmanager
async def _held(
    context: ApiContext, request: Request
) -> AsyncIterator[tuple[ResponsesRequest, ChatCompletionRequest, int]]:
    """Yield the body, its chat request, and its size in bytes; its memory stays reserved until the block ends."""
    async with held_body(request, partial(_parse, context)) as ((body, chat), num_bytes):
        if body.truncation == "auto":
            chat = await context.threads.run(partial(fitted_chat, context, chat), num_bytes=num_bytes)
        yield body, chat, num_bytes


def _parse(context: ApiContext, raw: bytes) -> tuple[ResponsesRequest, ChatCompletionRequest]:
    body = parse_body(context, ResponsesRequest, raw)
    context.resolve_model_name(body.model)
    refuse_unsupported(body)
    body.check()
    chat = body.as_chat()
    chat.check()
    return body, chat


class ResponseStream(SSEResponse):
    """Event stream of `/v1/responses`, without `[DONE]`; after a failure its last event is `response.failed`."""

    def __init__(self, in_flight: InFlight, request_id: str, writer: ResponsesWriter) -> None:
        super().__init__(in_flight, request_id, writer.frames(), writer.state.headers)
        self._writer = writer

    def _ending(self, error: Exception | None) -> bytes:
        return b"" if error is None else self._writer.failure(error)


@router.get("/v1/responses/{response_id}", **answers("Always 404: responses are not stored", None, refusals=NOT_FOUND))
async def retrieve_response(response_id: str) -> Response:
    raise NotStored(response_id)


@router.get(
    "/v1/responses/{response_id}/input_items",
    **answers("Always 404: responses are not stored", None, refusals=NOT_FOUND),
)
async def list_input_items(response_id: str) -> Response:
    raise NotStored(response_id)


@router.delete(
    "/v1/responses/{response_id}", **answers("Always 404: responses are not stored", None, refusals=NOT_FOUND)
)
async def delete_response(response_id: str) -> Response:
    raise NotStored(response_id)


@router.post(
    "/v1/responses/{response_id}/cancel", **answers("Always 404: responses are not stored", None, refusals=NOT_FOUND)
)
async def cancel_response(response_id: str) -> Response:
    """Always fails: a client cancels a response by closing the connection of its request."""
    raise NotStored(response_id)


@router.post("/v1/responses/compact", **answers("Always 404: send the conversation", None, refusals=NOT_FOUND))
async def compact_response() -> Response:
    raise NotCompacted
