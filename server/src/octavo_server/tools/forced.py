"""Answers whose shape a grammar enforces: for `tool_choice` "required" a JSON list of calls, for a named tool its
arguments alone. They look the same whatever the model; `schema` says what they may hold.
"""

from collections.abc import Callable

from octavo_server.reading.pieces import Steps
from octavo_server.tools.call_reader import CallReader


class RequiredReader(CallReader):
    def read_calls(self) -> Steps[None]:
        yield from self.skip_space()
        if not (yield from self.json_calls()):
            self._pos = self._kept
        yield from self.rest_as_text()


class NamedReader(CallReader):
    def __init__(self, new_id: Callable[[], str], name: str) -> None:
        super().__init__(new_id, frozenset({name}))
        self._name = name

    def read_calls(self) -> Steps[None]:
        yield from self.skip_space()
        yield from self.peek()
        self.open_call(self._name)
        yield from self.arguments()
        yield from self.rest_as_text()
