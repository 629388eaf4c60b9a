"""The response object of `/v1/responses`, its items, and the events of its stream."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo_server.openai.chat import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, kw_only=True):
    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []
    type: str = "output_text"


class ReasoningText(Struct, kw_only=True):
    text: str = ""
    type: str = "reasoning_text"


class OutputMessage(Struct, kw_only=True):
    id: str
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []
    role: str = "assistant"
    type: str = "message"


class ReasoningItem(Struct, kw_only=True):
    id: str
    status: ItemStatus = "in_progress"
    content: list[ReasoningText] = []
    summary: list[None] = []
    type: str = "reasoning"


class _ToolCall(Struct, kw_only=True):
    id: str
    call_id: str
    name: str
    status: ItemStatus = "in_progress"
    namespace: str | UnsetType = UNSET


class FunctionCall(_ToolCall, kw_only=True):
    arguments: str = ""
    type: str = "function_call"


class CustomToolCall(_ToolCall, kw_only=True):
    input: str = ""
    type: str = "custom_tool_call"


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: str


class ResponseError(Struct):
    code: str
    message: str


class InputTokens(Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class RawMessage(Struct):
    """Text and token ids of the whole prompt, or of the whole output with its special tokens."""

    message: str
    tokens: list[int]
    type: str = "raw_message_tokens"


class ResponseObject(Struct, kw_only=True):
    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[Any] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    text: dict[str, Any]
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    truncation: str = "disabled"
    background: bool = False
    store: bool = False
    previous_response_id: None = None
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET
    object: str = "response"


class ResponseStreamEvent(Struct, kw_only=True):
    """An event of any type in a stream; the fields that events of its type don't have are UNSET."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Any | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
