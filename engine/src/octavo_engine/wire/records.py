"""Requests and outputs that are sent between the processes (msgpack of these dataclasses).

A request of `n` sequences is one `EngineRequest`; its outputs have `index` 0..n-1. Each (request, index) gets
exactly one record with a `finish_reason`.
"""

from dataclasses import dataclass, field
from typing import Literal

from octavo_engine.wire.kv_stream import KVChange
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
#: "invalid_request": the request itself is the cause (HTTP 400). "unavailable": the engine cannot serve the request now
#: (HTTP 503). "internal": the engine is the cause (HTTP 500).
ErrorKind = Literal["invalid_request", "unavailable", "internal"]


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """The cause of finish_reason "error"."""

    message: str
    kind: ErrorKind = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The tokens [start, start + length) of an image in a prompt. `digest`: SHA-256 of the image processor's settings
    and the image's bytes; with a `cache_salt`, SHA-256 of this digest and the salt.

    The span may contain other tokens between image tokens, such as those that end a row of tiles. `grid`: rows and
    columns of the image's tokens, if the model has two coordinates per token (Qwen-VL): then all are image tokens.
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput(ImageSpan):
    """One image of a prompt. `data`: its bytes, as the client sent them. `kwargs`: JSON of image processor settings
    that replace the engine's for this image; "": none."""

    data: bytes
    kwargs: str = ""

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(start=self.start, length=self.length, digest=self.digest, grid=self.grid)


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """A validated request, with every optional field of the HTTP body resolved.

    `params.max_tokens` is an int that fits the context, `params.seed` is set unless greedy, `params.stop_token_ids`
    holds every id that stops generation except `eos_token_id` (which `ignore_eos` turns off).
    `grammar`: `params.structured_outputs` as the grammar library's text, checked; None without structured output.
    `arrival_s`: the front end's monotonic clock; it orders the requests of one tenant and one priority. `tenant`: the
    name of the API key; tenants share places, blocks and steps in proportion to their `weight`. `start_by_s`: a
    deadline on the clock of `arrival_s`; the engine ends a request that it has not started by then with finish_reason
    "abort".
    `adapter`: hash of the content of a loaded adapter; empty for the base model. `pooling`: the result is a vector, and
    no token is generated; `params.max_tokens` is then None. `images`: in the order of their tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_id: int | None = None
    arrival_s: float = 0.0
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    start_by_s: float | None = None
    cache_salt: str = ""
    adapter: str = ""
    grammar: str | None = None
    pooling: PoolingParams | None = None
    images: tuple[ImageInput, ...] = ()


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the top k (so up to k+1 entries).

    `rank`: 1-based rank of the chosen token in the whole vocabulary, equal tokens by id. `ranks`: of each entry; None:
    the entries after the chosen token have the ranks 1 to k.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    ranks: list[int] | None = None


@dataclass(slots=True, kw_only=True)
class Timing:
    """Durations in seconds, all taken from the engine core's own monotonic clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    inference_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class SeqOutput:
    """The output that one step adds to one sequence. The last record has `timing`, every record `num_cached_tokens`.

    `embedding`: the vector of a request with `pooling`, as little-endian float32.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timing: Timing | None = None
    embedding: bytes | None = None


@dataclass(slots=True, kw_only=True)
class TenantUsage:
    """Changes of a tenant's figures since the previous message that ended a step. `running`: change of the number of
    running sequences."""

    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Current gauges, and counters since start; one snapshot per step. Law: free + cached + in_use == total blocks."""

    received: int = 0  # requests, including rejected ones
    running: int = 0
    waiting: int = 0
    deferred: int = 0  # waiting requests whose grammar, images or adapter are not prepared yet
    free_blocks: int = 0
    cached_blocks: int = 0
    in_use_blocks: int = 0
    total_blocks: int = 0
    host_used_blocks: int = 0
    host_total_blocks: int = 0
    kv_used_slots: int = 0
    prefill_backlog_tokens: int = 0
    steps: int = 0
    batched_tokens: int = 0  # tokens of the latest step: computed prompt tokens plus generated tokens
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    preemptions: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    dropped_blocks: int = 0  # LRU drops from the host tier (or from the device, without a host tier)
    recomputed_tokens: int = 0
    cow_copies: int = 0
    mm_cache_queries: int = 0  # images looked up in the cache of processed images
    mm_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0  # steps of sequences with draft tokens
    draft_tokens: int = 0
    accepted_draft_tokens: list[int] = field(default_factory=list)  # by position in the draft
    step_s: float = 0.0  # duration of the latest step
    encoded_images: int = 0
    encode_s: float = 0.0  # seconds of encoding images
    stage_forward_bytes: int = 0  # bytes that the first stage sent to the next
    stage_back_bytes: int = 0  # bytes that the first stage received from the last
    encoder_usage: float = 0.0  # fraction of the encoder cache that is in use
    running_adapters: list[str] = field(default_factory=list)  # hashes of the adapters of running requests
    waiting_adapters: list[str] = field(default_factory=list)
    tenants: dict[str, TenantUsage] = field(default_factory=dict)  # by name, in messages that end a step

    @property
    def kv_usage(self) -> float:
        """The share of referenced blocks. Cached blocks are not counted: they can be evicted at any time."""
        return self.in_use_blocks / self.total_blocks if self.total_blocks else 0.0


@dataclass(slots=True, kw_only=True)
class BlockLife:
    """The life of a sampled device block whose cached content was evicted."""

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: list[float]


@dataclass(slots=True, kw_only=True)
class CoreOutputs:
    """One message from the engine core to its front end.

    `is_interim`: the message does not end a step. It reports, before a step runs, the blocks that the step overwrites
    and those that it will have computed, and the queue during the step; or, between steps, the effect of a call.
    """

    outputs: list[SeqOutput] = field(default_factory=list)
    stats: EngineStats | None = None
    kv: KVChange | None = None
    block_lives: list[BlockLife] | None = None
    is_interim: bool = False
