"""Bodies and responses of `/tokenize` and `/detokenize`, with vLLM's fields."""

from typing import Any, ClassVar

from msgspec import Struct
from pydantic import BaseModel

from octavo_server.openai.chat import ChatMessage
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import LenientModel
from octavo_server.openai.tools import Tool


class TokenizeRequest(LenientModel):
    """Body of `/tokenize`: it has either `prompt`, or `messages`, which the chat template renders."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {"messages": ChatMessage, "tools": Tool}

    model: str | None = None
    prompt: str | None = None
    messages: Entries[ChatMessage] | None = None
    tools: Entries[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(LenientModel):
    model: str | None = None
    tokens: Entries[int]


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str
