"""Configuration of one request's output parsers, and the sampling parameters that parsing needs from the engine."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import SamplingParams

from octavo_server.output_parsing.output_parser import OutputParser, ReasoningTokens
from octavo_server.output_parsing.reasoning_formats import SWITCH, ReasoningStart
from octavo_server.output_parsing.reasoning_parser import END, START
from octavo_server.output_parsing.tool_use import ToolUse

TokenId = Callable[[str], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserConfig:
    """`reasoning` None: reasoning, if any, stays part of the text. `shows_reasoning` False: reasoning is dropped.
    `custom_tools`: names of the tools whose calls have an input instead of arguments."""

    tools: ToolUse
    custom_tools: frozenset[str] = frozenset()
    reasoning: ReasoningStart | None = None
    shows_reasoning: bool = True

    def new_parser(self, token_id: TokenId) -> OutputParser | None:
        """Make the parser of one answer; None if the whole answer is text."""
        calls, reasoning = self.tools.new_parser(), self.reasoning
        if calls is None and reasoning is None:
            return None
        counter = None
        if reasoning is not None:
            counter = ReasoningTokens(start_id=token_id(START), end_id=token_id(END), is_open=reasoning.is_open)
        return OutputParser(
            reasoning=reasoning.new_parser() if reasoning else None,
            reasoning_tokens=counter,
            calls=calls,
            custom_tools=self.custom_tools,
            shows_reasoning=self.shows_reasoning,
            one_call_only=self.tools.one_call_only,
            ends_with_calls=self.tools.mode != "named",
        )

    def apply(self, params: SamplingParams, token_id: TokenId) -> None:
        """Set the tokens around reasoning and the special tokens that must stay in the text. Raises InvalidRequest.

        `params`: with the structured output of `ToolUse.constrain`.
        """
        if params.structured_outputs is not None:
            is_forced = self.tools.mode in ("required", "named")
            self._bound_reasoning(params, token_id, param="tool_choice" if is_forced else "response_format")
        elif params.thinking_token_budget is not None:
            self._bound_reasoning(params, token_id, param="thinking_token_budget")
        markers = [*self.tools.markers, *((START, END) if self.reasoning else ())]
        params.shown_special_token_ids = [i for i in map(token_id, markers) if i is not None]

    def _bound_reasoning(self, params: SamplingParams, token_id: TokenId, *, param: str) -> None:
        """Set the tokens around reasoning. Raises InvalidRequest, which names `param`, if the vocabulary lacks them."""
        if self.reasoning is None:
            return
        params.reasoning_end_token_id = token_id(END)
        params.reasoning_start_token_id = None if self.reasoning.is_open else token_id(START)
        if params.reasoning_end_token_id is None or not (self.reasoning.is_open or params.reasoning_start_token_id):
            raise InvalidRequest(
                f"This model reasons before it answers, and its vocabulary has no tokens {START} and {END}, so the end "
                "of its reasoning is unknown to a structured output (response_format, structured_outputs, tool_choice "
                '"required" or named) and to thinking_token_budget: turn reasoning off by chat_template_kwargs '
                f'{{"{SWITCH}": false}}, if the model supports that.',
                param=param,
            )
