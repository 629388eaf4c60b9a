"""`POST /v1/embeddings`: a vector for each text of an embedding model. All texts are checked before the first runs."""

import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from fastapi import APIRouter
from octavo_engine.outputs import unpack_floats
from octavo_engine.wire.errors import InvalidRequest, Unavailable
from octavo_engine.wire.pooling import PoolingParams
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.answer_state import CACHED_TOKENS
from octavo_server.api.context import ApiContext, ResponseMeta, context_of
from octavo_server.api.generation import Generation, GenerationDelta, PromptInput
from octavo_server.api.load_header import with_load
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import parse_body, read_body
from octavo_server.http.responses import CancellableJSONResponse
from octavo_server.openai.answer import count_usage
from octavo_server.openai.completion import Prompt
from octavo_server.openai.embedding import Embedding, EmbeddingList, EmbeddingRequest
from octavo_server.openai.fields import truncate

router = APIRouter()

RETRY_AFTER_S = 1.0


@router.post("/v1/embeddings", **accepts(EmbeddingRequest, "Compute the vectors of texts", answer=EmbeddingList))
async def create_embeddings(request: Request) -> Response:
    arrival_s = time.monotonic()
    context = context_of(request)
    context.check_queue(request)
    (body, params, texts), _ = await read_body(request, partial(_parse, context))
    context.admission.check_size(len(texts))
    meta = context.new_response_meta("embd-", request, body)
    resolved = context.client.resolve_pooling(params, priority=body.priority or 0)
    prompts = list[PromptInput]()
    for index, text in enumerate(texts):
        with _errors_naming("input" if len(texts) == 1 else f"input[{index}]"):
            prompts.append(await _prompt_input(context, body, text))
            context.client.fit(prompts[-1].token_ids, resolved)
    generation = context.new_generation(meta, body, prompts, resolved, arrival_s)
    answer = EmbeddingAnswer(meta, generation, as_base64=body.encoding_format == "base64")
    headers = with_load(request, context.client, answer.headers)
    return CancellableJSONResponse(context.in_flight, meta.id, answer.body, headers)


def _parse(context: ApiContext, raw: bytes) -> tuple[EmbeddingRequest, PoolingParams, list[Prompt]]:
    body = parse_body(context, EmbeddingRequest, raw)
    context.resolve_model_name(body.model)
    body.check()
    return body, body.pooling_params(), body.texts()


async def _prompt_input(context: ApiContext, body: EmbeddingRequest, text: Prompt) -> PromptInput:
    ids = text
    if isinstance(ids, str):
        special = body.add_special_tokens is not False
        may_exceed = body.truncate_prompt_tokens is not None
        ids = await context.encode_prompt(ids, add_special_tokens=special, may_exceed=may_exceed)
    size = body.truncate_prompt_tokens
    if size is not None:
        length = context.client.max_model_len
        ids = truncate(ids, size, side=body.truncation_side, max_model_len=length, num_output=0)
    return PromptInput(token_ids=ids)


@contextmanager
def _errors_naming(text: str) -> Iterator[None]:
    """Make errors about a prompt name the text of `input`."""
    try:
        yield
    except InvalidRequest as error:
        if error.param in ("prompt", "input_tokens"):
            error.param = text
        raise


class EmbeddingAnswer:
    """Collects the vectors of one request in any order; writes them in the order of its texts."""

    def __init__(self, meta: ResponseMeta, generation: Generation, *, as_base64: bool) -> None:
        self._meta = meta
        self._generation = generation
        self._as_base64 = as_base64
        self._vectors: dict[int, bytes] = {}
        self._num_cached = 0

    async def body(self) -> bytes:
        with self._generation.reserve_answer() as reservation:
            await self._generation.add_all(self._add, reservation)
            return msgspec.json.encode(self._response())

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(CACHED_TOKENS, str(self._num_cached).encode())]

    def _add(self, delta: GenerationDelta) -> None:
        vector = delta.output.embedding
        if vector is None:
            raise Unavailable("The request was aborted: send it again.", retry_after_s=RETRY_AFTER_S)
        self._vectors[delta.prompt_idx] = vector
        self._num_cached += delta.output.num_cached_tokens

    def _response(self) -> EmbeddingList:
        meta, write = self._meta, _base64 if self._as_base64 else unpack_floats
        vectors = sorted(self._vectors.items())
        return EmbeddingList(
            id=meta.id,
            created=meta.created,
            model=meta.model,
            data=[Embedding(index=index, embedding=write(vector)) for index, vector in vectors],
            usage=count_usage(self._generation.num_prompt_tokens, 0, self._num_cached),
        )


def _base64(vector: bytes) -> str:
    return b64encode(vector).decode()
