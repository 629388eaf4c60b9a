"""`hermes` (Hermes 2 and 3, Qwen 2.5, Qwen 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Calls may appear anywhere in the text. Some models omit the end marker, or write several calls between two markers.
"""

from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ToolCallParser
from octavo_server.output_parsing.tool_grammar import CallNotation, json_call

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    markers = (START, END)
    notations = (
        CallNotation(
            marker=START,
            before="ws",
            call=json_call("arguments"),
            between=f'ws "{END}" ws "{START}" ws',
            after=f'ws "{END}"',
        ),
    )

    def parse_calls(self) -> Steps[None]:
        marker = yield from self.emit_text_until(START)
        while marker:
            yield from self.skip_space()
            if not (yield from self.parse_json_call()):
                self.reject_call(len(START))
                marker = yield from self.emit_text_until(START)
                continue
            marker = yield from self._after_call()

    def _after_call(self) -> Steps[str]:
        while True:
            self.commit()
            yield from self.skip_space()
            if (yield from self.peek_char()) != "{" or not (yield from self.parse_json_call()):
                break
        self._pos = self._kept
        marker = yield from self.emit_text_until(START, END)
        return marker if marker != END else (yield from self.emit_text_until(START))
