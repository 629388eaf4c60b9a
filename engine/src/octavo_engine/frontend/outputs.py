"""The outputs of `LLM` and `AsyncLLM`, with vLLM's attribute names.

One class serves every `OutputKind`: "cumulative" (each item holds everything so far), "delta" (each item's `outputs`
hold only the sequences that advanced, with only their new text, tokens and log-probabilities) and "final" (one item).
"""

import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Generic, Literal, TypeVar

import msgspec

from octavo_engine.wire.records import ErrorKind, FinishReason, Timing
from octavo_engine.wire.sampling import RequestOutputKind, SamplingParams

OutputKind = Literal["cumulative", "delta", "final"]
Pooled = TypeVar("Pooled")
_KINDS: dict[RequestOutputKind, OutputKind] = {
    RequestOutputKind.CUMULATIVE: "cumulative",
    RequestOutputKind.DELTA: "delta",
    RequestOutputKind.FINAL_ONLY: "final",
}


def output_kind(params: SamplingParams) -> OutputKind:
    return _KINDS[params.output_kind]


class Logprob(msgspec.Struct):
    """A token's log-probability. `rank` is 1-based, over the whole vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: token id -> Logprob; the chosen token comes first, then the top k in descending order.
PositionLogprobs = dict[int, Logprob]


class CompletionOutput(msgspec.Struct, kw_only=True):
    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    timing: Timing | None = None  # set with the last record: durations by the engine core's clock
    num_preemptions: int = 0

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Readings of the front end's `time.monotonic()`; do not compare them with another process's clock."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """`error` and `error_kind`: the message and the cause, once a sequence has ended with finish_reason "error".

    `embedding`: an embedding request's vector, as little-endian float32; its only sequence has no tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None
    embedding: bytes | None = None


def unpack_floats(vector: bytes) -> list[float]:
    """Return the numbers of a vector of little-endian float32."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Pooled]):
    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None
    error_kind: ErrorKind | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of `LLM.embed` for one prompt. With an `error`, the vector is empty."""

    __slots__ = ()

    @classmethod
    def from_request_output(cls, output: RequestOutput) -> "EmbeddingRequestOutput":
        return cls(
            request_id=output.request_id,
            outputs=EmbeddingOutput(unpack_floats(output.embedding or b"")),
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            error=output.error,
            error_kind=output.error_kind,
        )


@dataclass(slots=True)
class ScoringOutput:
    score: float


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of `LLM.score` for one pair. With an `error`, the score is NaN."""

    __slots__ = ()

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
            error_kind=first.error_kind or second.error_kind,
        )


def pair_cosines(first: Sequence[bytes], second: Sequence[bytes]) -> list[float]:
    """Return similarities of texts, as in vLLM: the cosines of vectors of little-endian float32.

    One `first` is compared with all of `second`.
    """
    unpacked = [unpack_floats(vector) for vector in first]
    return [cosine(one, unpack_floats(other)) for one, other in zip(cycle(unpacked), second, strict=False)]


def cosine(first: list[float], second: list[float]) -> float:
    """Return the cosine of two vectors; 0 for a vector of zeros."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(operator.mul, first, second)) / lengths if lengths else 0.0
