"""`ReasoningParser`: reasoning between `<think>` and `</think>` at the start of an answer, apart from the answer itself.

The template of many models writes `<think>` into the prompt, so an answer may begin in the middle of reasoning.
Newlines at the edges of both belong to neither: templates put them back when the conversation is rendered again.
"""

from octavo_server.output_parsing.events import ReasoningDelta, TextDelta
from octavo_server.output_parsing.streaming_parser import Steps, StreamingParser

START, END = "<think>", "</think>"


class ReasoningParser(StreamingParser):
    """`is_open`: the answer begins with reasoning, with or without `<think>`. Without `</think>` all of it is."""

    def __init__(self, *, is_open: bool) -> None:
        super().__init__()
        self.is_open = is_open
        self.is_thinking = is_open
        self._at_edge = False  # nothing but newlines so far
        self._newlines = ""  # of reasoning; shown only if more of it follows

    def parse(self) -> Steps[None]:
        yield from self.skip_space()
        if (yield from self.accept_token(START)) or self.is_open:
            self.commit()
            self.is_thinking = self._at_edge = True
            yield from self.emit_text_until(END)
            self.is_thinking, self._at_edge = False, True
        else:
            self._pos = self._kept
        yield from self.emit_rest_as_text()

    def emit_text(self, text: str) -> None:
        if self._at_edge:
            text = text.lstrip("\n")
            self._at_edge = not text
        if not self.is_thinking:
            if text:
                self._events.append(TextDelta(text))
            return
        text = self._newlines + text
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        if shown:
            self._events.append(ReasoningDelta(shown))
