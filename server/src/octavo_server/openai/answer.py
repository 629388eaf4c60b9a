"""What every answer and every chunk carries, and the token counts of one HTTP request.

`cached_tokens` is always told: routers and users learn from it. What is UNSET isn't written at all.
"""

from msgspec import UNSET, Struct, UnsetType


class PromptDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Answer(Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


def count_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptDetails(cached_tokens))
