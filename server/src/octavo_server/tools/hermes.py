"""`hermes` (Hermes 2 and 3, Qwen 2.5, Qwen 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Calls stand anywhere in the text. Some models forget the end marker, or write several calls between two markers.
"""

from octavo_server.reading.pieces import Steps
from octavo_server.tools.call_reader import CallReader

START, END = "<tool_call>", "</tool_call>"


class HermesReader(CallReader):
    markers = (START, END)

    def read_calls(self) -> Steps[None]:
        marker = yield from self.text_until(START)
        while marker:
            yield from self.skip_space()
            if not (yield from self.json_call()):
                self.give_up(len(START))
                marker = yield from self.text_until(START)
                continue
            marker = yield from self._after_call()

    def _after_call(self) -> Steps[str]:
        while True:
            self.commit()
            yield from self.skip_space()
            if (yield from self.peek()) != "{" or not (yield from self.json_call()):
                break
        self._pos = self._kept
        marker = yield from self.text_until(START, END)
        return marker if marker != END else (yield from self.text_until(START))
