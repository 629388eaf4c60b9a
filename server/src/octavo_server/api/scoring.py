"""`POST /score` and `POST /rerank`: how similar texts are, as the cosine of their vectors; a query is computed once."""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET, Struct, UnsetType
from octavo_engine.frontend.outputs import pair_cosines
from octavo_engine.wire.errors import InvalidRequest
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.context import ApiContext, ResponseMeta, context_of
from octavo_server.api.embedding_request import NamedText, VectorAnswer, prepare
from octavo_server.api.generation import Generation
from octavo_server.api.load_header import with_load
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import held_body, parse_vectors
from octavo_server.http.responses import CancellableJSONResponse
from octavo_server.openai.answer import Usage
from octavo_server.openai.completion import Prompt
from octavo_server.openai.embedding import VectorFields, named_texts
from octavo_server.openai.entries import Entries

router = APIRouter()

Texts = str | Entries[str]
Document = str | dict[str, Any]


class ScoreRequest(VectorFields):
    text_1: Texts | None = Field(None, description="One text, compared with each of text_2, or several.")
    text_2: Texts | None = Field(None, description="Texts to compare: any number, or as many as in text_1.")
    queries: Texts | None = Field(None, description="Another name of text_1.")
    documents: Texts | None = Field(None, description="Another name of text_2.")

    def sides(self) -> tuple[list[tuple[str, Prompt]], list[tuple[str, Prompt]]]:
        """The texts of both sides with their names. Raises InvalidRequest."""
        first, second = self._side("text_1", "queries"), self._side("text_2", "documents")
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 holds {len(first)} texts and text_2 {len(second)}: send one text_1, or as many as in text_2.",
                param="text_1",
            )
        return first, second

    def _side(self, *names: str) -> list[tuple[str, Prompt]]:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"send one of {' and '.join(names)}.", param=names[0])
        value = getattr(self, given[0])
        return named_texts(given[0], [value] if isinstance(value, str) else value)


class RerankRequest(VectorFields):
    query: str
    documents: Document | list[Document] = Field(description="Texts, or objects with a `text`; one, or a list.")
    top_n: int | None = Field(None, ge=0, description="Number of best documents to return. Default, and 0: all.")
    return_documents: bool | None = Field(
        None, description="Return the texts, too. Default: true; for /v2/rerank: false."
    )

    def texts(self) -> list[tuple[str, Prompt]]:
        """The query, then the documents, with their names. Raises InvalidRequest."""
        if isinstance(self.documents, list):
            texts = [_text_of(f"documents[{index}]", document) for index, document in enumerate(self.documents)]
        else:
            texts = [_text_of("documents", self.documents)]
        return [*named_texts("query", [self.query]), *named_texts("documents", texts)]


def _text_of(name: str, document: Document) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} has no text: send a string, or an object with a text.", param=name)
    return text


class Score(Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RankedText(Struct):
    text: str


class Ranked(Struct, kw_only=True):
    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RerankResults(Struct, kw_only=True):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage


COHERE = "/v2/rerank"

_SCORES = accepts(ScoreRequest, "Compare texts", answer=ScoreList)
_RANKS = accepts(RerankRequest, "Order documents by their similarity to a query", answer=RerankResults)


@router.post("/score", **_SCORES)
@router.post("/v1/score", **_SCORES)
async def create_scores(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    arrival_s = time.monotonic()
    async with held_body(request, partial(_parse_score, context)) as ((body, first, second), _):
        texts = [*first, *second]
        meta, generation = await prepare(context, request, body, texts, prefix="score-", arrival_s=arrival_s)
    return _respond(request, context, ScoreAnswer(meta, generation, num_first=len(first)))


@router.post("/rerank", **_RANKS)
@router.post("/v1/rerank", **_RANKS)
@router.post(COHERE, **_RANKS)
async def create_ranks(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    arrival_s = time.monotonic()
    async with held_body(request, partial(_parse_rerank, context)) as ((body, texts), _):
        meta, generation = await prepare(context, request, body, texts, prefix="rerank-", arrival_s=arrival_s)
    shows_text = body.return_documents
    if shows_text is None:
        shows_text = not request.scope["path"].endswith(COHERE)
    documents = [str(text) for _, text in texts[1:]] if shows_text else None
    return _respond(request, context, RerankAnswer(meta, generation, documents, top_n=body.top_n))


def _respond(request: Request, context: ApiContext, answer: VectorAnswer) -> Response:
    headers = with_load(request, context.client, answer.headers)
    return CancellableJSONResponse(context.in_flight, answer.meta.id, answer.body, headers)


def _parse_score(context: ApiContext, raw: bytes) -> tuple[ScoreRequest, list[NamedText], list[NamedText]]:
    body = parse_vectors(context, ScoreRequest, raw)
    return body, *body.sides()


def _parse_rerank(context: ApiContext, raw: bytes) -> tuple[RerankRequest, list[NamedText]]:
    body = parse_vectors(context, RerankRequest, raw)
    return body, body.texts()


class ScoreAnswer(VectorAnswer):
    """`num_first`: number of first texts, 1 or as many as second texts."""

    def __init__(self, meta: ResponseMeta, generation: Generation, *, num_first: int) -> None:
        super().__init__(meta, generation)
        self._num_first = num_first

    def response(self, vectors: list[bytes]) -> ScoreList:
        scores = pair_cosines(vectors[: self._num_first], vectors[self._num_first :])
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        meta = self.meta
        return ScoreList(id=meta.id, created=meta.created, model=meta.model, data=data, usage=self.usage())


class RerankAnswer(VectorAnswer):
    """`documents`: texts to return beside the scores."""

    def __init__(
        self, meta: ResponseMeta, generation: Generation, documents: list[str] | None, *, top_n: int | None
    ) -> None:
        super().__init__(meta, generation)
        self._documents = documents
        self._top_n = top_n or None

    def response(self, vectors: list[bytes]) -> RerankResults:
        scores = pair_cosines(vectors[:1], vectors[1:])
        ranked = [Ranked(index=index, relevance_score=score) for index, score in enumerate(scores)]
        ranked.sort(key=lambda entry: -entry.relevance_score)  # stable: equal documents keep their order
        results = ranked[: self._top_n]
        if self._documents is not None:
            for entry in results:
                entry.document = RankedText(self._documents[entry.index])
        return RerankResults(id=self.meta.id, model=self.meta.model, results=results, usage=self.usage())
