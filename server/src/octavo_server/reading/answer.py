"""`AnswerReader`: one answer, from its text to its parts: reasoning first, then text and calls.

Pure: it is told the text as it comes and that it ended, in pieces of any size.
"""

from octavo_server.reading.parts import CallArguments, CallStart, Part, Reasoning, Text, merge
from octavo_server.reading.pieces import PieceReader
from octavo_server.tools.call_reader import CallReader


class AnswerReader:
    """`thinking` tells reasoning from the rest, `calls` reads the rest. `ends_with_calls`: they are a reason to end."""

    def __init__(
        self,
        *,
        thinking: PieceReader | None = None,
        calls: CallReader | None = None,
        hides_reasoning: bool = False,
        one_call_only: bool = False,
        ends_with_calls: bool = True,
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._hides_reasoning = hides_reasoning
        self._one_call_only = one_call_only
        self._ends_with_calls = ends_with_calls

    def push(self, text: str) -> list[Part]:
        return self._read([Text(text)] if self._thinking is None else self._thinking.push(text))

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
            return self._hides_reasoning
        return self._one_call_only and isinstance(part, CallStart | CallArguments) and part.index > 0
