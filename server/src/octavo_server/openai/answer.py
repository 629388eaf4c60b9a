"""Fields of every response and chunk, and the token counts of one HTTP request.

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
    """Times of a request, with --enable-per-request-metrics, under vLLM's names; null if there are too few tokens.

    Measured by the engine core's clock. The time to the first token starts when the request is scheduled, so it
    doesn't include the queue time. For several sequences the times are those of the last one to end.
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
    metrics: RequestTimes | UnsetType = UNSET


class FullAnswer(Answer, kw_only=True):
    """A response that isn't streamed: it has all of vLLM's fields, null if unused. Here `metrics` may be null, too."""

    metrics: RequestTimes | None = None  # type: ignore[assignment]
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
