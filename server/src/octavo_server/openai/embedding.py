"""Bodies of `/v1/embeddings`, and the fields that all routes of embedding models share."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.pooling import PoolingParams
from pydantic import Field

from octavo_server.openai.answer import Usage
from octavo_server.openai.completion import Prompt, split_prompts
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import EngineFields

#: Fields of text generation and unsupported settings -> their accepted values, which have no effect.
_OF_TEXT = ("stream", "logprobs", "top_logprobs", "tools", "tool_choice", "messages")
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OF_TEXT, (None, False, [], "none", "auto")),
    **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc", "overlap_tokens", "rank_fields"), (None,)),
    "n": (None, 1),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
}


class VectorFields(EngineFields):
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Tokens to keep; -1: as many as fit the context."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Right, the default, keeps the first tokens."
    )
    use_activation: bool | None = Field(
        None, description="Vectors of length 1. Default: as the model was trained. Scores are the same with both."
    )

    def pooling_params(self) -> PoolingParams:
        return PoolingParams()

    def check(self) -> None:
        """Check rules that pydantic doesn't know. Raises InvalidRequest."""
        self.check_salt()
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value not in _REFUSED[name]:
                raise InvalidRequest(f"{name} is not a setting of embedding models: leave it out.", param=name)


class EmbeddingRequest(VectorFields):
    input: str | Entries[int] | Entries[Entries[int]] | Entries[str] = Field(
        description="One text or several, as strings or as token ids."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian float32. Default: float."
    )
    dimensions: int | None = Field(None, ge=1, description="Number of first values to keep, then normalised.")
    normalize: bool | None = Field(None, description="The older name of use_activation.")

    def texts(self) -> list[tuple[str, Prompt]]:
        """The texts with their names. Raises InvalidRequest for an empty text, or none."""
        return named_texts("input", split_prompts(self.input))

    def pooling_params(self) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize, use_activation=self.use_activation)


def named_texts(field: str, texts: Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    """Name the texts of a field after their places. Raises InvalidRequest for an empty text, or none."""
    if not texts:
        raise InvalidRequest(f"{field} must not be empty: send a text.", param=field)
    named = [(f"{field}[{index}]" if len(texts) > 1 else field, text) for index, text in enumerate(texts)]
    for name, text in named:
        if not text:
            raise InvalidRequest(f"{name} is empty: send at least one token, or leave it out.", param=name)
    return named


def to_base64(vector: bytes) -> str:
    return b64encode(vector).decode()


class Embedding(Struct, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingList(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
