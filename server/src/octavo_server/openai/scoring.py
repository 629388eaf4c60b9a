"""Bodies of `/score` and `/rerank`: pairs of texts and their similarity, in the forms of vLLM, Jina and Cohere."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType
from octavo_engine.wire.errors import InvalidRequest
from pydantic import Field

from octavo_server.openai.answer import Usage
from octavo_server.openai.completion import Prompt
from octavo_server.openai.embedding import VectorFields, named_texts
from octavo_server.openai.entries import Entries

Texts = str | Entries[str]
Document = str | dict[str, Any]


class ScoreRequest(VectorFields):
    text_1: Texts | None = Field(None, description="A text, which is compared with all others, or several.")
    text_2: Texts | None = Field(None, description="The texts to compare, as many as in text_1 if these are several.")
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
    top_n: int | None = Field(None, ge=0, description="Only this many best documents. Default, and 0: all.")
    return_documents: bool | None = Field(
        None, description="Texts beside the scores. Default: true; of /v2/rerank: false."
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
