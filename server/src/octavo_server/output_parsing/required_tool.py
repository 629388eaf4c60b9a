"""Parsers of answers that a grammar forces to be calls, independent of the format that the model was trained on.

For `tool_choice` "required" the answer is a JSON list of calls; for a named tool it is the JSON object of the tool's
arguments. The module `tool_grammar` builds both shapes.
"""

from collections.abc import Callable

from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ToolCallParser
from octavo_server.output_parsing.tool_grammar import CallNotation, json_call


class RequiredToolParser(ToolCallParser):
    notations = (CallNotation(before='"[" ws', call=json_call("parameters"), between='ws "," ws', after='ws "]"'),)

    def parse_calls(self) -> Steps[None]:
        yield from self.skip_space()
        if not (yield from self.parse_json_calls()):
            self._pos = self._kept
        yield from self.emit_rest_as_text()


class NamedToolParser(ToolCallParser):
    def __init__(self, new_id: Callable[[], str], name: str) -> None:
        super().__init__(new_id, frozenset({name}))
        self._name = name

    def parse_calls(self) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self._has_arguments()):
            self.start_call(self._name)
            yield from self.parse_arguments()
        yield from self.emit_rest_as_text()

    def _has_arguments(self) -> Steps[bool]:
        """False if the text ends at the opening brace: an answer of one token is no call."""
        start = self._pos
        yield from self.accept_token("{")
        yield from self.skip_space()
        ahead = yield from self.peek_char()
        self._pos = start
        return bool(ahead)
