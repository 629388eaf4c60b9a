"""`Reading`: how the answers of one request are read, and what that asks of the engine."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import SamplingParams

from octavo_server.reading.answer import AnswerReader
from octavo_server.tools.use import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    tools: ToolUse

    def reader(self) -> AnswerReader | None:
        """For one answer; None if it is all text."""
        calls = self.tools.reader()
        if calls is None:
            return None
        return AnswerReader(
            calls=calls, one_call_only=self.tools.one_call_only, ends_with_calls=self.tools.mode != "named"
        )

    def apply(self, params: SamplingParams, token_id: Callable[[str], int | None]) -> None:
        """Sets what the model must write and which special tokens we must see. Raises InvalidRequest."""
        shape = self.tools.shape()
        if params.structured_outputs is not None and self.tools.mode != "none":
            message = f"tool_choice {self.tools.mode!r} and another shape of the output can't both be asked for."
            raise InvalidRequest(message, param="tool_choice")
        params.structured_outputs = params.structured_outputs or shape
        found = [token_id(marker) for marker in self.tools.markers]
        params.shown_special_token_ids = [i for i in found if i is not None]
