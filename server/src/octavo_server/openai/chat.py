"""Bodies of `/v1/chat/completions`: request, response and chunks."""

from typing import Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType
from octavo_engine.text.messages import content_text
from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel, Field, field_validator

from octavo_server.openai.answer import Answer, FullAnswer
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import GenerationFields, LenientModel
from octavo_server.openai.tools import Tool, ToolCall, ToolCallDelta, ToolFields, call_of_function, input_arguments

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(LenientModel):
    type: str
    text: str | None = None


class ChatMessage(LenientModel):
    role: str = Field(min_length=1)
    content: str | Entries[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: Entries[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @field_validator("tool_calls")
    @classmethod
    def _convert_custom_calls(cls, calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        return None if calls is None else [_described_call(call) for call in calls]


def _described_call(call: dict[str, Any]) -> dict[str, Any]:
    """Describe the call of a custom tool as that of a function. A malformed call is rejected when it is rendered."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    return call_of_function(call.get("id"), custom.get("name"), input_arguments(custom.get("input")))


class ChatCompletionRequest(ToolFields, GenerationFields):
    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {"messages": ChatMessage, "tools": Tool}

    messages: Entries[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequest("messages must hold at least one message.", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt can't both be true."
            raise InvalidRequest(message, param="continue_final_message")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_top_logprobs(self) -> int:
        """Entries of `top_logprobs`; -1: all that the engine returns."""
        return -1 if self.logprob_token_ids else self.top_logprobs or 0

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def final_message_text(self) -> str:
        """Text of the last message if its role is "assistant", else empty."""
        last = self.messages[-1]
        return content_text(last.model_dump()["content"], "messages[-1].content") if last.role == "assistant" else ""

    @property
    def echoed(self) -> str:
        """Text that `echo` puts before the answer: that of the last message if its role is "assistant", else empty."""
        return self.final_message_text if self.echo else ""

    def drop_images(self) -> None:
        """Forget the parts that are no text: images are long, and the prompt has them."""
        for message in self.messages:
            if isinstance(message.content, list):
                message.content = [p for p in message.content if isinstance(p, str) or p.text is not None]

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the client sent them, without fields that are null; `ChatTemplate.render` converts them."""
        return [message.model_dump(exclude_none=True) for message in self.messages]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class AnswerMessage(Struct):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | UnsetType | None = UNSET


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    routed_experts: None = None


class ChatCompletion(FullAnswer, kw_only=True):
    choices: list[ChatChoice]
    object: str = "chat.completion"
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None


class DeltaMessage(Struct):
    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType | None = UNSET
