"""`llama3_json` (Llama 3.1, 3.2, 3.3): `{"name": ..., "parameters": {...}}`, separated by semicolons.

A call has no markers, except that `<|python_tag|>` may precede it, so JSON that is part of the text must not be taken
for a call: an object is a call only if it has a name and arguments; after other text, a tool must also have that name.
If the request has a response format, an object is a call only if it begins as the grammar writes calls.
"""

from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ARGUMENT_KEYS, ToolCallParser
from octavo_server.output_parsing.tool_grammar import CallNotation, json_call

PYTHON_TAG = "<|python_tag|>"
KEY = "parameters"
_KEYS = frozenset({"name", "type", "id", *ARGUMENT_KEYS})
_CALL, _BETWEEN = json_call(KEY), 'ws ";" ws'


class Llama3JsonParser(ToolCallParser):
    markers = (PYTHON_TAG,)
    notations = (
        CallNotation(call=_CALL, between=_BETWEEN),
        CallNotation(marker=PYTHON_TAG, before="ws", call=_CALL, between=_BETWEEN),
    )

    def parse_calls(self) -> Steps[None]:
        while marker := (yield from self.emit_text_until(PYTHON_TAG, "{")):
            if marker == PYTHON_TAG:
                self.commit()
                yield from self.skip_space()
                if (yield from self.peek_char()) != "{":
                    self.reject_call(0)
                    continue
                self.commit()
            else:
                self._pos -= 1
                if self.is_whole and not (yield from self._is_call_ahead()):
                    yield from self.emit_rest_as_text()
                    return
            any_name_allowed = marker == PYTHON_TAG or not self.has_text
            if not (yield from self._call(any_name_allowed)):
                self.reject_call(1)

    def _is_call_ahead(self) -> Steps[bool]:
        """Return whether the text continues with a call of a tool, at the first character that decides it."""
        names = [f'"{name}"' for name in self.tool_names]
        for expected in (["{"], ['"name"'], [":"], names, [","], [f'"{KEY}"']):
            yield from self.skip_space()
            for token in expected:
                if (yield from self.accept_token(token)):
                    break
            else:
                self._pos = self._kept
                return False
        self._pos = self._kept
        return True

    def _call(self, any_name_allowed: bool) -> Steps[bool]:
        is_call = yield from self.parse_json_call(
            accepts_key=_KEYS.__contains__,
            accepts_name=lambda name: any_name_allowed or name in self.tool_names,
            needs_arguments=True,
        )
        if is_call:
            yield from self.skip_space()
            if (yield from self.accept_token(";")):
                self.commit()
            self._pos = self._kept
        return is_call
