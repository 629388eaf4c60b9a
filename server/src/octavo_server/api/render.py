"""The render endpoints return the input that a generating endpoint would send to the engine, without generation.

The code of the generating endpoints reads the body, so token ids, limits and errors can't differ. Routers compute block
hashes from two fields of the response: `token_ids`, and `cache_salt` as the engine receives it.
"""

from typing import Any

from fastapi import APIRouter
from msgspec import Struct
from octavo_engine.wire.sampling import SamplingParams
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.anthropic.errors import MessagesErrorResponse
from octavo_server.anthropic.messages import MessagesRequest
from octavo_server.anthropic.routes import RENDER
from octavo_server.api.chat import read_chat
from octavo_server.api.completions import read_completion
from octavo_server.api.context import ResponseMeta
from octavo_server.api.dialects.messages import read_message
from octavo_server.api.dialects.responses import read_response
from octavo_server.api.generation import Generation
from octavo_server.api.openapi import accepts
from octavo_server.json_responses import json_reply
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.fields import GenerationFields
from octavo_server.openai.responses import ResponsesRequest

router = APIRouter()


class RenderedRequest(Struct, kw_only=True):
    """vLLM's `GenerateRequest` of one prompt, with its text.

    `sampling_params` is complete: defaults are filled in, and `max_tokens` fits the free context; only an unset `seed`
    stays unset.
    """

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None
    sampling_params: SamplingParams
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    features: None = None
    kv_transfer_params: None = None


@router.post(
    "/v1/chat/completions/render",
    **accepts(ChatCompletionRequest, "Token ids of a conversation's prompt", answer=RenderedRequest),
)
async def render_chat_completion(request: Request) -> Response:
    turn = await read_chat(request)
    (rendered,) = _rendered(turn.meta, turn.body, turn.generation)
    return json_reply(rendered)


@router.post(
    "/v1/completions/render", **accepts(CompletionRequest, "Token ids of each prompt", answer=list[RenderedRequest])
)
async def render_completion(request: Request) -> Response:
    return json_reply(_rendered(*await read_completion(request)))


@router.post(
    "/v1/responses/render",
    **accepts(ResponsesRequest, "Token ids of a response's prompt", answer=RenderedRequest),
)
async def render_response(request: Request) -> Response:
    _, turn = await read_response(request)
    (rendered,) = _rendered(turn.meta, turn.body, turn.generation)
    return json_reply(rendered)


@router.post(
    RENDER,
    **accepts(MessagesRequest, "Token ids of a message's prompt", answer=RenderedRequest, error=MessagesErrorResponse),
)
async def render_message(request: Request) -> Response:
    turn = await read_message(request)
    (rendered,) = _rendered(turn.meta, turn.body, turn.generation)
    return json_reply(rendered)


def _rendered(meta: ResponseMeta, body: GenerationFields, generation: Generation) -> list[RenderedRequest]:
    options = body.stream_options.model_dump(exclude_unset=True) if body.stream_options else None
    several = len(generation.prompts) > 1
    return [
        RenderedRequest(
            request_id=f"{meta.id}-{i}" if several else meta.id,
            model=meta.model,
            token_ids=prompt.token_ids,
            prompt=prompt.text,
            sampling_params=params,
            stream=bool(body.stream),
            stream_options=options,
            cache_salt=generation.cache_salt or None,
            priority=generation.priority,
        )
        for i, (prompt, params) in enumerate(zip(generation.prompts, generation.fitted(), strict=True))
    ]
