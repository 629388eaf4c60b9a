"""`/tokenize` and `/detokenize`: vLLM's shapes."""

from typing import Any

from msgspec import Struct

from octavo_server.openai.chat import ChatMessage
from octavo_server.openai.fields import Lenient
from octavo_server.openai.tools import Tool


class TokenizeRequest(Lenient):
    """Either `prompt`, or `messages` to be rendered by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Lenient):
    model: str | None = None
    tokens: list[int]


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str
