"""Similarity of two texts: the cosine of their vectors, as in vLLM."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from octavo_engine.frontend.outputs import EmbeddingRequestOutput, unpack_floats


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True, kw_only=True)
class ScoringRequestOutput:
    """The result of `LLM.score` for one pair. With an `error`, the score is not a number."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None

    @classmethod
    def from_pair(cls, first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> "ScoringRequestOutput":
        error = first.error or second.error
        vectors = first.outputs.embedding, second.outputs.embedding
        return cls(
            request_id=f"{first.request_id}_{second.request_id}",
            outputs=ScoringOutput(math.nan if error else cosine(*vectors)),
            prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
            num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
            error=error,
        )


def pair_cosines(first: Sequence[bytes], second: Sequence[bytes]) -> list[float]:
    """Return the cosines of vectors of little-endian float32; one `first` is compared with all of `second`."""
    unpacked = [unpack_floats(vector) for vector in first]
    return [cosine(one, unpack_floats(other)) for one, other in zip(cycle(unpacked), second, strict=False)]


def cosine(first: list[float], second: list[float]) -> float:
    """Return the cosine of two vectors; 0 for a vector of zeros."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(operator.mul, first, second)) / lengths if lengths else 0.0
