"""Fields that every response and chunk has, and the token counts (`usage`) of one HTTP request.

`cached_tokens` is always sent, since routers and users evaluate it. A field that is UNSET is not sent.
"""

from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType

if TYPE_CHECKING:
    from octavo_engine.wire.records import Timing


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class RequestTimes(Struct):
    """Times of a request, sent if --enable-per-request-metrics is set, under vLLM's names; null for too few tokens.

    They are measured by the engine core's clock. The time to the first token starts when the request is scheduled, so
    it doesn't include the queue time. A request with several sequences has the times of the last sequence to end.
    """

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None


class Answer(Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: RequestTimes | UnsetType | None = UNSET


class FullAnswer(Answer, kw_only=True):
    """A response that is not streamed: it has all of vLLM's fields, null where they are unused."""

    metrics: RequestTimes | UnsetType | None = None
    service_tier: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


def request_times(timing: "Timing", num_tokens: int) -> RequestTimes:
    decode_s, total_s = timing.decode_s, timing.inference_s
    return RequestTimes(
        time_to_first_token_ms=1000 * timing.prefill_s if num_tokens else None,
        generation_time_ms=1000 * decode_s if num_tokens else None,
        queue_time_ms=1000 * timing.queue_s,
        mean_itl_ms=1000 * decode_s / (num_tokens - 1) if num_tokens > 1 else None,
        tokens_per_second=num_tokens / total_s if num_tokens and total_s else None,
    )


def count_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptDetails(cached_tokens))
