"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`: give HTTP clients the model's tokenizer."""

from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter
from msgspec import Struct
from octavo_engine.text.template import special_tokens
from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.chat import render_chat
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import accepts, answers
from octavo_server.api.request_parsing import held_body, parse_body, read_body
from octavo_server.json_responses import json_reply
from octavo_server.openai.chat import ChatCompletionRequest, ChatMessage
from octavo_server.openai.entries import Entries
from octavo_server.openai.errors import NotEnabled
from octavo_server.openai.fields import LenientModel
from octavo_server.openai.tools import Tool

router = APIRouter()


class TokenizeRequest(LenientModel):
    """Body of `/tokenize`: it has either `prompt`, or `messages`, which the chat template renders."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {"messages": ChatMessage, "tools": Tool}

    model: str | None = None
    prompt: str | None = None
    messages: Entries[ChatMessage] | None = None
    tools: Entries[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(LenientModel):
    model: str | None = None
    tokens: Entries[int]


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str


#: Class of a tokenizer whose tokenizer_config.json names none, as transformers loads it.
DEFAULT_CLASS = "PreTrainedTokenizerFast"


@router.post(
    "/tokenize", **accepts(TokenizeRequest, "Token ids of a prompt or of a rendered conversation", answer=Tokenized)
)
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    async with held_body(request, partial(parse_body, context, TokenizeRequest)) as (body, num_bytes):
        context.resolve_model_name(body.model)
        ids = await _token_ids(context, body, num_bytes=num_bytes)
    strings = None
    if body.return_token_strs:
        strings = await context.threads.run(
            lambda: [*map(context.client.frontend.tokenizer.piece, ids)], num_bytes=len(ids)
        )
    return json_reply(Tokenized(len(ids), context.client.frontend.max_model_len, ids, strings))


@router.post("/detokenize", **accepts(DetokenizeRequest, "The text of token ids", answer=Detokenized))
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body, num_bytes = await read_body(request, partial(parse_body, context, DetokenizeRequest))
    context.resolve_model_name(body.model)
    decode = partial(context.decode, body.tokens, param="tokens")
    return json_reply(Detokenized(await context.threads.run(decode, num_bytes=num_bytes)))


@router.get(
    "/tokenizer_info",
    **answers("Settings of the tokenizer, with the chat template", dict[str, Any], refusals=(401, 404)),
)
async def tokenizer_info(request: Request) -> Response:
    """The content of tokenizer_config.json with the text of special tokens, as in vLLM; 404 without
    --enable-tokenizer-info-endpoint."""
    context = context_of(request)
    if not context.config.enable_tokenizer_info_endpoint:
        raise NotEnabled("/tokenizer_info", "--enable-tokenizer-info-endpoint")
    client = context.client
    info = {"tokenizer_class": DEFAULT_CLASS, "bos_token": None, "eos_token": None, **client.frontend.tokenizer_config}
    info |= special_tokens(client.frontend.tokenizer_config, client.frontend.tokenizer)
    if client.frontend.chat_template is not None:
        info["chat_template"] = client.frontend.chat_template.source
    return json_reply(info)


async def _token_ids(context: ApiContext, body: TokenizeRequest, *, num_bytes: int) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages.", param="prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await context.encode_prompt(body.prompt, add_special_tokens=special)
    asked = {name: getattr(body, name) for name in ChatCompletionRequest.model_fields.keys() & body.model_fields_set}
    chat = ChatCompletionRequest.model_validate(asked)
    chat.check()
    return (await render_chat(context, chat, num_bytes=num_bytes)).token_ids
