"""Bodies of `/v1/completions`: request, response and chunks.

A prompt is a string, token ids, or a list of either; choice index = prompt index * n + sequence index.
"""

from typing import Any

from msgspec import Struct
from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.answer import Answer, FullAnswer
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import GenerationFields

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


def split_prompts(given: str | list[int] | list[list[int]] | list[str]) -> list[Prompt]:
    """Return a list of prompts; a string and a list of token ids are one prompt each."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [[token for token in given if isinstance(token, int)]]
    return [prompt for prompt in given if not isinstance(prompt, int)]


class CompletionRequest(GenerationFields):
    prompt: str | Entries[int] | Entries[Entries[int]] | Entries[str]
    logprobs: int | None = None

    def prompts(self) -> list[Prompt]:
        """The prompts as a list. Raises InvalidRequest for an empty prompt."""
        prompts = split_prompts(self.prompt)
        if not prompts or not all(prompts):
            raise InvalidRequest("prompt must not be empty: send a string or token ids.", param="prompt")
        return prompts

    @property
    def is_echo_only(self) -> bool:
        """True if only the echoed prompt is requested; the engine then generates one token, which is not returned."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def output_limit(self) -> int:
        if self.is_echo_only:
            return 1
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice, kw_only=True):
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    routed_experts: None = None


class CompletionChunk(Answer, kw_only=True):
    choices: list[CompletionChunkChoice]
    object: str = "text_completion"


class Completion(FullAnswer, kw_only=True):
    choices: list[CompletionChoice]
    object: str = "text_completion"
