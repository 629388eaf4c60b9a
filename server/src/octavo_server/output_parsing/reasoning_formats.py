"""The reasoning parsers by the names that `--reasoning-parser` takes, and what one request makes of one.

Whether an answer begins with reasoning depends on the prompt: the template may have opened it (`<think>` at its end),
or closed it again (`enable_thinking: false`, as Qwen's templates do it).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_server.output_parsing.reasoning_parser import END, START, ReasoningParser

SWITCH = "enable_thinking"


@dataclass(frozen=True, slots=True)
class ReasoningStart:
    """The answers of one request may hold reasoning. `is_open`: they begin with it."""

    is_open: bool

    def new_parser(self) -> ReasoningParser:
        return ReasoningParser(is_open=self.is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """`always`: the model reasons unasked. `has_switch`: `chat_template_kwargs` may turn it off."""

    always: bool = False
    has_switch: bool = False

    def reasoning_start(
        self, prompt: str, *, continued: str, template_kwargs: Mapping[str, Any]
    ) -> ReasoningStart | None:
        """`continued`: the part of the answer that ends the prompt, if there is one. None: there is no reasoning."""
        if self.has_switch and template_kwargs.get(SWITCH) is False:
            return None
        said = continued if START in continued or END in continued else prompt.rstrip()[-len(END) :]
        opened, closed = said.rfind(START), said.rfind(END)
        if closed > opened:
            return None
        return ReasoningStart(opened >= 0 or self.always)


REASONING_PARSERS = {
    "deepseek_r1": ReasoningFormat(always=True),
    "qwen3": ReasoningFormat(has_switch=True),
}
