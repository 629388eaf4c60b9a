"""`ReasoningParser`: separates the reasoning between `<think>` and `</think>` at the start of an answer from the text.

The template of many models writes `<think>` into the prompt, so an answer may start within the reasoning. Newlines at
the edges of reasoning and text are dropped: templates add them again when they render the conversation.
"""

from octavo_server.output_parsing.events import ReasoningDelta, TextDelta
from octavo_server.output_parsing.streaming_parser import Steps, StreamingParser

START, END = "<think>", "</think>"


class ReasoningParser(StreamingParser):
    """`is_open`: the answer starts with reasoning, with or without `<think>`, and all of it is reasoning if there is no
    `</think>`."""

    def __init__(self, *, is_open: bool) -> None:
        super().__init__()
        self.is_open = is_open
        self.is_thinking = is_open
        self._at_edge = False  # True if only newlines have followed the last marker
        self._newlines = ""  # newlines at the end of the reasoning; emitted only if more reasoning follows

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
