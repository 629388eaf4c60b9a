"""`OutputParserConfig`: how the answers of one request are read, and what that asks of the engine."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import SamplingParams

from octavo_server.output_parsing.output_parser import OutputParser
from octavo_server.output_parsing.reasoning_formats import SWITCH, ReasoningStart
from octavo_server.output_parsing.reasoning_parser import END, START
from octavo_server.output_parsing.reasoning_tokens import ReasoningTokens
from octavo_server.output_parsing.tool_use import ToolUse

TokenId = Callable[[str], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserConfig:
    """`reasoning` None: no reasoning is told apart."""

    tools: ToolUse
    reasoning: ReasoningStart | None = None
    shows_reasoning: bool = True

    def new_parser(self, token_id: TokenId) -> OutputParser | None:
        """For one answer; None if it is all text."""
        calls, reasoning = self.tools.new_parser(), self.reasoning
        if calls is None and reasoning is None:
            return None
        return OutputParser(
            reasoning=reasoning.new_parser() if reasoning else None,
            reasoning_tokens=_count(reasoning, token_id) if reasoning else None,
            calls=calls,
            shows_reasoning=self.shows_reasoning,
            one_call_only=self.tools.one_call_only,
            ends_with_calls=self.tools.mode != "named",
        )

    def apply(self, params: SamplingParams, token_id: TokenId) -> None:
        """Sets what the model must write, and which special tokens we must see. Raises InvalidRequest."""
        shape = self.tools.shape()
        if params.structured_outputs is not None and self.tools.mode != "none":
            message = f"tool_choice {self.tools.mode!r} and another shape of the output can't both be asked for."
            raise InvalidRequest(message, param="tool_choice")
        params.structured_outputs = params.structured_outputs or shape
        if params.structured_outputs is not None and self.reasoning is not None:
            self._begin_after_reasoning(params, token_id, param="tool_choice" if shape else "response_format")
        markers = [*self.tools.markers, *((START, END) if self.reasoning else ())]
        params.shown_special_token_ids = [i for i in map(token_id, markers) if i is not None]

    def _begin_after_reasoning(self, params: SamplingParams, token_id: TokenId, *, param: str) -> None:
        assert self.reasoning is not None
        params.reasoning_end_token_id = token_id(END)
        params.reasoning_start_token_id = None if self.reasoning.is_open else token_id(START)
        if params.reasoning_end_token_id is None or not (self.reasoning.is_open or params.reasoning_start_token_id):
            raise InvalidRequest(
                f"This model reasons before it answers, and {START} and {END} are no tokens of its own, so the shape "
                'of an output (response_format, structured_outputs, tool_choice "required" or named) can\'t begin '
                f'after it: turn reasoning off by chat_template_kwargs {{"{SWITCH}": false}}, if the model has that.',
                param=param,
            )


def _count(reasoning: ReasoningStart, token_id: TokenId) -> ReasoningTokens:
    return ReasoningTokens(start_id=token_id(START), end_id=token_id(END), is_open=reasoning.is_open)
