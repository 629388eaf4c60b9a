"""`POST /tokenize` and `POST /detokenize`: the model's tokenizer over HTTP, without generation."""

from functools import partial

from fastapi import APIRouter
from octavo_engine.wire.errors import InvalidRequest
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.chat import render_chat
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import parse_body, read_body
from octavo_server.json_responses import json_reply
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

router = APIRouter()


@router.post(
    "/tokenize", **accepts(TokenizeRequest, "Token ids of a prompt or of a rendered conversation", answer=Tokenized)
)
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body, num_bytes = await read_body(request, partial(parse_body, context, TokenizeRequest))
    context.resolve_model_name(body.model)
    ids = await _token_ids(context, body, num_bytes=num_bytes)
    strings = None
    if body.return_token_strs:
        strings = await context.threads.run(lambda: [*map(context.client.tokenizer.piece, ids)], num_bytes=len(ids))
    return json_reply(Tokenized(len(ids), context.client.max_model_len, ids, strings))


@router.post("/detokenize", **accepts(DetokenizeRequest, "The text of token ids", answer=Detokenized))
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body, num_bytes = await read_body(request, partial(parse_body, context, DetokenizeRequest))
    context.resolve_model_name(body.model)
    decode = partial(context.decode, body.tokens, param="tokens")
    return json_reply(Detokenized(await context.threads.run(decode, num_bytes=num_bytes)))


async def _token_ids(context: ApiContext, body: TokenizeRequest, *, num_bytes: int) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages.", param="prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await context.encode(body.prompt, add_special_tokens=special)
    asked = {name: getattr(body, name) for name in ChatCompletionRequest.model_fields.keys() & body.model_fields_set}
    chat = ChatCompletionRequest.model_validate(asked)
    chat.check()
    return (await render_chat(context, chat, num_bytes=num_bytes)).token_ids
