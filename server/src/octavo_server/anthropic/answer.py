"""The response of `/v1/messages`, its blocks, and the events of its stream; models in Anthropic's form."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from octavo_server.openai.answer import Usage
from octavo_server.openai.models import ModelObject

VERSION = "anthropic-version"  # a header of all requests of Anthropic's clients

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """`signature` is random: this server doesn't verify blocks that clients send back."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct, kw_only=True):
    """`input_tokens` doesn't include the tokens that were read from the prefix cache, as in Anthropic's API."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessageObject(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


class TextFragment(Struct):
    text: str
    type: str = "text_delta"


class ThinkingFragment(Struct):
    thinking: str
    type: str = "thinking_delta"


class SignatureFragment(Struct):
    signature: str
    type: str = "signature_delta"


class InputFragment(Struct):
    partial_json: str
    type: str = "input_json_delta"


Fragment = TextFragment | ThinkingFragment | SignatureFragment | InputFragment


class StopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(Struct):
    message: MessageObject
    type: str = "message_start"


class Ping(Struct):
    type: str = "ping"


class BlockStart(Struct):
    index: int
    content_block: Block
    type: str = "content_block_start"


class BlockDelta(Struct):
    index: int
    delta: Fragment
    type: str = "content_block_delta"


class BlockStop(Struct):
    index: int
    type: str = "content_block_stop"


class MessageDelta(Struct):
    delta: StopDelta
    usage: MessageUsage
    type: str = "message_delta"


class MessageStop(Struct):
    type: str = "message_stop"


StreamEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def message_usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


class ModelInfo(Struct, kw_only=True):
    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: str = "active"
    type: str = "model"


class ModelPage(Struct, kw_only=True):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model_info(card: ModelObject) -> ModelInfo:
    return ModelInfo(
        id=card.id,
        display_name=card.id,
        created_at=datetime.fromtimestamp(card.created, UTC),
        max_input_tokens=card.max_model_len,
        max_tokens=card.max_model_len,
    )


def model_page(cards: Sequence[ModelObject]) -> ModelPage:
    """All models as one page."""
    first_id, last_id = (cards[0].id, cards[-1].id) if cards else (None, None)
    return ModelPage(data=[*map(model_info, cards)], first_id=first_id, last_id=last_id)
