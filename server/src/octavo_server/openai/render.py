"""The answer of the render endpoints: vLLM's `GenerateRequest`, one per prompt, with the prompt's text beside it."""

from typing import Any

from msgspec import Struct
from octavo_engine.wire.sampling import SamplingParams


class RenderedRequest(Struct, kw_only=True):
    """`sampling_params` is resolved: `max_tokens` is the room there really is; an open `seed` stays open."""

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
