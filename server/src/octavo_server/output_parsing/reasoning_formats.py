"""Reasoning formats by the names that `--reasoning-parser` accepts, and how they apply to one request.

Whether an answer starts with reasoning depends on the prompt: the template may have opened it (`<think>` at the end
of the prompt) or closed it again (`enable_thinking: false` in Qwen's templates).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_server.output_parsing.reasoning_parser import END, START, ReasoningParser

SWITCH = "enable_thinking"


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """State in which the answers of one request start. `is_open`: the answers start within reasoning."""

    is_open: bool

    def new_parser(self) -> ReasoningParser:
        return ReasoningParser(is_open=self.is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """`always`: every answer begins with reasoning. `has_switch`: `enable_thinking` in `chat_template_kwargs` may turn
    reasoning off."""

    always: bool = False
    has_switch: bool = False

    def reasoning_start(
        self, prompt: str, *, continued: str, template_kwargs: Mapping[str, Any]
    ) -> ReasoningStart | None:
        """Return the state in which answers to `prompt` start, or None if answers have no reasoning. `continued`: the
        part of the prompt that is the start of the answer (continue_final_message), or empty."""
        if self.has_switch and template_kwargs.get(SWITCH) is False:
            return None
        tail = continued if START in continued or END in continued else prompt.rstrip()[-len(END) :]
        opened, closed = tail.rfind(START), tail.rfind(END)
        if closed > opened:
            return None
        return ReasoningStart(opened >= 0 or self.always)


REASONING_PARSERS = {
    "deepseek_r1": ReasoningFormat(always=True),
    "qwen3": ReasoningFormat(has_switch=True),
}
