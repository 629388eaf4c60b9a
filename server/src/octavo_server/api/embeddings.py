"""`POST /v1/embeddings`: a vector for each text of an embedding model."""

import time
from functools import partial

from fastapi import APIRouter
from octavo_engine.frontend.outputs import unpack_floats
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.context import ApiContext, ResponseMeta, context_of
from octavo_server.api.embedding_request import NamedText, VectorAnswer, prepare
from octavo_server.api.generation import Generation
from octavo_server.api.load_header import with_load
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import held_body, parse_vectors
from octavo_server.http.responses import CancellableJSONResponse
from octavo_server.openai.embedding import Embedding, EmbeddingList, EmbeddingRequest, to_base64

router = APIRouter()


@router.post("/v1/embeddings", **accepts(EmbeddingRequest, "Compute the vectors of texts", answer=EmbeddingList))
async def create_embeddings(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    arrival_s = time.monotonic()
    async with held_body(request, partial(_parse, context)) as ((body, texts), _):
        meta, generation = await prepare(context, request, body, texts, prefix="embd-", arrival_s=arrival_s)
    answer = EmbeddingAnswer(meta, generation, as_base64=body.encoding_format == "base64")
    headers = with_load(request, context.client, answer.headers)
    return CancellableJSONResponse(context.in_flight, meta.id, answer.body, headers)


def _parse(context: ApiContext, raw: bytes) -> tuple[EmbeddingRequest, list[NamedText]]:
    body = parse_vectors(context, EmbeddingRequest, raw)
    return body, body.texts()


class EmbeddingAnswer(VectorAnswer):
    def __init__(self, meta: ResponseMeta, generation: Generation, *, as_base64: bool) -> None:
        super().__init__(meta, generation)
        self._as_base64 = as_base64

    def response(self, vectors: list[bytes]) -> EmbeddingList:
        write = to_base64 if self._as_base64 else unpack_floats
        data = [Embedding(index=index, embedding=write(vector)) for index, vector in enumerate(vectors)]
        meta = self.meta
        return EmbeddingList(id=meta.id, created=meta.created, model=meta.model, data=data, usage=self.usage())
