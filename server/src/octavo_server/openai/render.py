"""Response of the render endpoints: vLLM's `GenerateRequest`, one per prompt, plus the text of the prompt."""

from typing import Any

from msgspec import Struct
from octavo_engine.wire.sampling import SamplingParams


class RenderedRequest(Struct, kw_only=True):
    """`sampling_params` is complete: defaults are filled in, and `max_tokens` fits the free context; only an unset
    `seed` stays unset."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None
    sampling_params: SamplingParams
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    features: None = None
    kv_transfer_params: None = None
