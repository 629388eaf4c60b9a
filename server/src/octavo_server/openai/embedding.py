"""Bodies of `/v1/embeddings`: the request, and the response with a vector for each text, in the order of `input`."""

from typing import Any, Literal

from msgspec import Struct
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.pooling import PoolingParams
from pydantic import Field

from octavo_server.openai.answer import Usage
from octavo_server.openai.completion import Prompt, split_prompts
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import EngineFields

#: Fields of requests for text, and forms of vectors that are not built -> the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("stream", "logprobs", "top_logprobs", "tools", "tool_choice", "messages"), (None, False, [], "none")
    ),
    "n": (None, 1),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
}


class EmbeddingRequest(EngineFields):
    input: str | Entries[int] | Entries[Entries[int]] | Entries[str] = Field(
        description="One text or several, as strings or as token ids."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian float32. Default: float."
    )
    dimensions: int | None = Field(None, ge=1, description="Only this many first values, which are then normalised.")
    normalize: bool | None = Field(None, description="Vectors of length 1. Default: as the model was trained.")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="-1: as many as the model's context holds.")
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Left, the default, keeps the last tokens."
    )

    def texts(self) -> list[Prompt]:
        """The texts as a list. Raises InvalidRequest for an empty text, which it names, or none."""
        texts = split_prompts(self.input)
        if not texts:
            raise InvalidRequest("input must not be empty: send a text or token ids.", param="input")
        for index, text in enumerate(texts):
            if not text:
                where = "input" if len(texts) == 1 else f"input[{index}]"
                raise InvalidRequest(f"{where} is empty: send at least one token, or leave it out.", param=where)
        return texts

    def pooling_params(self) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize)

    def check(self) -> None:
        """Check rules that pydantic doesn't know. Raises InvalidRequest."""
        self.check_salt()
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value not in _REFUSED[name]:
                raise InvalidRequest(f"{name} is not a field of /v1/embeddings: leave it out.", param=name)


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
