"""`OutputParser`: turns the text of one answer into events: reasoning first, then text and tool calls.

Pure: the caller pushes the text in chunks of any size and then calls `finish`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from octavo_server.output_parsing.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_adjacent,
)
from octavo_server.output_parsing.json_scanner import CustomInput
from octavo_server.output_parsing.reasoning_parser import ReasoningParser
from octavo_server.output_parsing.tool_call_parser import ToolCallParser


class ReasoningTokens:
    """Counts the reasoning tokens of an answer: the tokens between the two markers, if each marker is one token.

    If the markers are not single tokens, all tokens of each chunk that starts within reasoning are counted: a few too
    many.
    """

    def __init__(self, *, start_id: int | None, end_id: int | None, is_open: bool) -> None:
        self.num_tokens = 0
        self._start_id = start_id
        self._end_id = end_id
        self._is_open = is_open
        self._has_ended = False

    def add(self, token_ids: Sequence[int], *, began_as_reasoning: bool) -> None:
        if self._end_id is None:
            self.num_tokens += len(token_ids) if began_as_reasoning else 0
            return
        for token_id in token_ids:
            if token_id == self._end_id:
                self._has_ended = True
            elif token_id == self._start_id:
                self._is_open = True
            elif self._is_open and not self._has_ended:
                self.num_tokens += 1


class OutputParser:
    """Parses one answer: `reasoning` separates the reasoning from the text, `calls` parses the text.

    `custom_tools`: functions whose calls have an input instead of arguments. `ends_with_calls`: an answer with calls
    gets the finish reason "tool_calls" instead of "stop".
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningParser | None = None,
        reasoning_tokens: ReasoningTokens | None = None,
        calls: ToolCallParser | None = None,
        custom_tools: frozenset[str] = frozenset(),
        shows_reasoning: bool = True,
        one_call_only: bool = False,
        ends_with_calls: bool = True,
    ) -> None:
        self.emits_reasoning = reasoning is not None and shows_reasoning
        self._reasoning = reasoning
        self._reasoning_tokens = reasoning_tokens
        self._calls = calls
        self._custom_tools = custom_tools
        self._input: tuple[int, CustomInput] | None = None  # index and input of the latest call of a custom tool
        self._shows_reasoning = shows_reasoning
        self._one_call_only = one_call_only
        self._ends_with_calls = ends_with_calls

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None if reasoning is not separated from the text."""
        return None if self._reasoning_tokens is None else self._reasoning_tokens.num_tokens

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Parse the next chunk; return the events that became certain. `token_ids`: tokens of `text`, to count them."""
        if self._reasoning is None:
            return self._parse([TextDelta(text)])
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.add(token_ids, began_as_reasoning=self._reasoning.is_thinking)
        return self._parse(self._reasoning.push(text))

    def finish(self) -> list[OutputEvent]:
        parts = [] if self._reasoning is None else self._parse(self._reasoning.finish())
        if self._calls is None:
            return parts
        return merge_adjacent([*parts, *self._with_inputs(self._visible(self._calls.finish())), *self._end_input()])

    def finish_reason(self, reason: str | None) -> str | None:
        """Convert the engine's finish reason to OpenAI's."""
        has_called = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if reason == "stop" and has_called and self._ends_with_calls else reason

    def _parse(self, parts: list[OutputEvent]) -> list[OutputEvent]:
        read: list[OutputEvent] = []
        for part in parts:
            read += self._calls.push(part.text) if self._calls and isinstance(part, TextDelta) else [part]
        return merge_adjacent(self._with_inputs(self._visible(read)))

    def _visible(self, parts: list[OutputEvent]) -> list[OutputEvent]:
        return [part for part in parts if not self._is_hidden(part)]

    def _with_inputs(self, parts: list[OutputEvent]) -> Iterator[OutputEvent]:
        """Replace the arguments of custom tools by the input that they hold."""
        for part in parts:
            if self._input is not None and isinstance(part, ToolCallArguments):
                if text := self._input[1].push(part.text):
                    yield replace(part, text=text, is_custom=True)
                continue
            yield from self._end_input()
            if isinstance(part, ToolCallStart) and part.name in self._custom_tools:
                self._input = part.index, CustomInput()
                yield replace(part, is_custom=True)
            else:
                yield part

    def _end_input(self) -> Iterator[OutputEvent]:
        if self._input is not None:
            (index, custom), self._input = self._input, None
            if text := custom.finish():
                yield ToolCallArguments(index, text, is_custom=True)

    def _is_hidden(self, part: OutputEvent) -> bool:
        if isinstance(part, ReasoningDelta):
            return not self._shows_reasoning
        return self._one_call_only and isinstance(part, ToolCallStart | ToolCallArguments) and part.index > 0
