"""`llama3_json` (Llama 3.1, 3.2, 3.3): `{"name": ..., "parameters": {...}}`, several divided by semicolons.

An object is all that marks a call (`<|python_tag|>` may stand before it), so JSON that is meant for the reader must
pass: an object is a call only with a name and with arguments, and, after other text, only if a tool has that name.
"""

from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ARGUMENT_KEYS, ToolCallParser

PYTHON_TAG = "<|python_tag|>"
_KEYS = frozenset({"name", "type", "id", *ARGUMENT_KEYS})


class Llama3JsonParser(ToolCallParser):
    markers = (PYTHON_TAG,)

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
            anything_goes = marker == PYTHON_TAG or not self.has_text
            if not (yield from self._call(anything_goes)):
                self.reject_call(1)

    def _call(self, anything_goes: bool) -> Steps[bool]:
        is_call = yield from self.parse_json_call(
            accepts_key=_KEYS.__contains__,
            accepts_name=lambda name: anything_goes or name in self.tool_names,
            needs_arguments=True,
        )
        if is_call:
            yield from self.skip_space()
            if (yield from self.accept_token(";")):
                self.commit()
            self._pos = self._kept
        return is_call
