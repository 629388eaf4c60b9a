"""`ResponseOutput`: the items of a growing response and the stream events that report them. Pure.

At most one item is open. Text opens a message, reasoning a reasoning item, a tool call a call item; opening an item
closes the previous one. White space alone, as models write it around their markers, opens no item.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from octavo_server.openai.chat import TokenLogprob
from octavo_server.openai.responses import NamespacedName
from octavo_server.openai.responses_answer import (
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseStreamEvent,
)
from octavo_server.output_parsing.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

COMPLETED: ItemStatus = "completed"


class ResponseOutput:
    """`new_id("msg")` makes an item id such as `msg_...`. `namespaced`: the function's name in the prompt -> its own.
    The caller adds sequence numbers to the returned events."""

    def __init__(self, new_id: Callable[[str], str], namespaced: Mapping[str, NamespacedName]) -> None:
        self._namespaced = namespaced
        self.items: list[OutputItem] = []
        self._new_id = new_id
        self._pieces: list[str] = []  # pieces of the open item's text or arguments
        self._logprobs: list[TokenLogprob] = []  # tokens of the open message, or of the white space before it
        self._space = ""  # white space that may become the start of a message

    def add(self, part: OutputEvent, logprobs: Sequence[TokenLogprob] = ()) -> list[ResponseStreamEvent]:
        """Add an event of the parsed answer; return stream events. `logprobs`: log-probabilities of a text's tokens."""
        match part:
            case TextDelta(text):
                return self._add_text(text, logprobs)
            case ReasoningDelta(text):
                opening = [] if isinstance(self._open, ReasoningItem) else self._begin_reasoning()
                return [*opening, *self._grow("response.reasoning_text.delta", text)]
            case ToolCallStart(_, call_id, name, is_custom):
                name, namespace = self._namespaced.get(name, (name, UNSET))
                item_type, prefix = (CustomToolCall, "ctc") if is_custom else (FunctionCall, "fc")
                return self._begin(item_type(id=self._new_id(prefix), call_id=call_id, name=name, namespace=namespace))
            case ToolCallArguments(_, text, is_custom):
                kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
                return self._grow(f"response.{kind}.delta", text)

    def finish(self, *, is_complete: bool) -> list[ResponseStreamEvent]:
        """Close the open item and return the stream events; a response without items gets an empty message."""
        opening = [] if self.items else self._begin_message()
        return [*opening, *self._close(COMPLETED if is_complete else "incomplete")]

    def fail(self) -> None:
        """Mark the open item as incomplete, without an event: `response.failed` reports the failure."""
        self._close("incomplete")

    @property
    def _open(self) -> OutputItem | None:
        return self.items[-1] if self.items and self.items[-1].status == "in_progress" else None

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[ResponseStreamEvent]:
        if isinstance(self._open, OutputMessage):
            self._logprobs += logprobs
            return self._grow_text(text, list(logprobs))
        self._space += text
        self._logprobs += logprobs
        return self._begin_message() if self._space.strip() else []

    def _begin_message(self) -> list[ResponseStreamEvent]:
        """Open a message with the white space and text kept so far."""
        text, logprobs = self._space, self._logprobs
        events = self._begin(OutputMessage(id=self._new_id("msg"), content=[]))
        self._logprobs = logprobs
        opened = self._at_part("response.content_part.added", part=OutputText())
        return [*events, opened, *self._grow_text(text, list(logprobs))]

    def _begin_reasoning(self) -> list[ResponseStreamEvent]:
        events = self._begin(ReasoningItem(id=self._new_id("rs"), content=[]))
        return [*events, self._at_part("response.content_part.added", part=ReasoningText())]

    def _begin(self, item: OutputItem) -> list[ResponseStreamEvent]:
        closing = self._close(COMPLETED)
        self._space, self._logprobs, self._pieces = "", [], []
        self.items.append(item)
        return [*closing, self._of_item("response.output_item.added")]

    def _grow_text(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseStreamEvent]:
        events = self._grow("response.output_text.delta", text)
        for event in events:
            event.logprobs = logprobs
        return events

    def _grow(self, kind: str, text: str) -> list[ResponseStreamEvent]:
        if not text:
            return []
        self._pieces.append(text)
        is_call = isinstance(self._open, FunctionCall | CustomToolCall)
        event = self._at_item(kind) if is_call else self._at_part(kind)
        event.delta = text
        return [event]

    def _close(self, status: ItemStatus) -> list[ResponseStreamEvent]:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return []
        match item:
            case OutputMessage():
                events = self._close_message(item, text)
            case ReasoningItem():
                item.content = [ReasoningText(text=text)]
                done = self._at_part("response.reasoning_text.done", text=text)
                events = [done, self._at_part("response.content_part.done", part=item.content[0])]
            case FunctionCall():
                item.arguments = text
                done = self._at_item("response.function_call_arguments.done")
                done.name, done.arguments = item.name, text
                events = [done]
            case CustomToolCall():
                item.input = text
                done = self._at_item("response.custom_tool_call_input.done")
                done.input = text
                events = [done]
        item.status = status
        return [*events, self._of_item("response.output_item.done")]

    def _close_message(self, item: OutputMessage, text: str) -> list[ResponseStreamEvent]:
        item.content = [OutputText(text=text, logprobs=self._logprobs)]
        done = self._at_part("response.output_text.done", text=text)
        done.logprobs = self._logprobs
        return [done, self._at_part("response.content_part.done", part=item.content[0])]

    def _at_part(
        self, kind: str, *, part: OutputText | ReasoningText | None = None, text: str | None = None
    ) -> ResponseStreamEvent:
        event = self._at_item(kind)
        event.content_index = 0
        if part is not None:
            event.part = part
        if text is not None:
            event.text = text
        return event

    def _at_item(self, kind: str) -> ResponseStreamEvent:
        return ResponseStreamEvent(type=kind, output_index=len(self.items) - 1, item_id=self.items[-1].id)

    def _of_item(self, kind: str) -> ResponseStreamEvent:
        """Make an event with a copy of the latest item."""
        return ResponseStreamEvent(type=kind, output_index=len(self.items) - 1, item=replace(self.items[-1]))
