"""`AnswerReader`: one answer, from its text to its parts: reasoning first, then text and calls.

Pure: it is told the text as it comes and that it ended, in pieces of any size.
"""

from collections.abc import Sequence

from octavo_server.reading.parts import CallArguments, CallStart, Part, Reasoning, Text, merge
from octavo_server.reasoning.think import ThinkReader
from octavo_server.reasoning.tokens import ReasoningTokens
from octavo_server.tools.call_reader import CallReader


class AnswerReader:
    """`thinking` tells reasoning from the rest, `calls` reads the rest. `ends_with_calls`: they are a reason to end."""

    def __init__(
        self,
        *,
        thinking: ThinkReader | None = None,
        reasoning_tokens: ReasoningTokens | None = None,
        calls: CallReader | None = None,
        shows_reasoning: bool = True,
        one_call_only: bool = False,
        ends_with_calls: bool = True,
    ) -> None:
        self.tells_reasoning = thinking is not None and shows_reasoning
        self._thinking = thinking
        self._reasoning_tokens = reasoning_tokens
        self._calls = calls
        self._shows_reasoning = shows_reasoning
        self._one_call_only = one_call_only
        self._ends_with_calls = ends_with_calls

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None where no reasoning is told apart."""
        return None if self._reasoning_tokens is None else self._reasoning_tokens.num_tokens

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """`token_ids`: those that came with the text; only counted."""
        if self._thinking is None:
            return self._read([Text(text)])
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.add(token_ids, began_as_reasoning=self._thinking.is_thinking)
        return self._read(self._thinking.push(text))

    def finish(self) -> list[Part]:
        parts = [] if self._thinking is None else self._read(self._thinking.finish())
        return parts if self._calls is None else merge([*parts, *self._wanted(self._calls.finish())])

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's, from the engine's."""
        has_called = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if reason == "stop" and has_called and self._ends_with_calls else reason

    def _read(self, parts: list[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            read += self._calls.push(part.text) if self._calls and isinstance(part, Text) else [part]
        return merge(self._wanted(read))

    def _wanted(self, parts: list[Part]) -> list[Part]:
        return [part for part in parts if not self._is_hidden(part)]

    def _is_hidden(self, part: Part) -> bool:
        if isinstance(part, Reasoning):
            return not self._shows_reasoning
        return self._one_call_only and isinstance(part, CallStart | CallArguments) and part.index > 0
