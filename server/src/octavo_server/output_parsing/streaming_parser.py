"""`StreamingParser`: parses a text that arrives in chunks, by a generator that waits when it needs more text.

A subclass writes `parse` as if the whole text were present, with `yield from` before each look ahead. Its decisions
never depend on how the text was split, because each look ahead waits until its result is certain. Text that may be part
of a call is kept, so that it can be emitted as text if it turns out not to be a call.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from octavo_server.output_parsing.events import OutputEvent, merge_adjacent

T = TypeVar("T")
#: A generator that yields while it waits for more text and returns a T.
Steps = Generator[None, None, T]

#: Number of characters of an answer that may be parsed twice because they looked like a call and were none. Beyond it
#: the rest of the answer is text: parsing could otherwise take time quadratic in the answer's length.
MAX_REREAD = 1 << 16

SPACE = re.compile(r"\s*")


class StreamingParser(ABC):
    """`push` and `finish` return the events that became certain by the new text; `finish` holds no text back."""

    def __init__(self) -> None:
        self._buffer = ""
        self._pos = 0  # index of the next character to parse
        self._kept = 0  # index of the first kept character; those from here to `_pos` may still become text
        self._ended = False
        self._num_reread = 0
        self._events: list[OutputEvent] = []
        self._steps: Steps[None] | None = None

    def push(self, text: str) -> list[OutputEvent]:
        self._buffer = self._buffer[self._kept :] + text
        self._pos -= self._kept
        self._kept = 0
        return self._advance()

    def finish(self) -> list[OutputEvent]:
        self._ended = True
        return self._advance()

    def _advance(self) -> list[OutputEvent]:
        if self._steps is None:
            self._steps = self.parse()
        next(self._steps, None)
        events, self._events = merge_adjacent(self._events), []
        return events

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Parse the answer to its end."""

    @abstractmethod
    def emit_text(self, text: str) -> None:
        """Emit text that is neither a marker nor part of a call."""

    def wait_for_text(self) -> Steps[bool]:
        """Wait for the next chunk; return False if the text has ended."""
        if self._ended:
            return False
        yield
        return not self._ended

    def peek_char(self) -> Steps[str]:
        """Return the next character without consuming it, or "" at the end of the text."""
        while self._pos == len(self._buffer):
            if not (yield from self.wait_for_text()):
                break
        return self._buffer[self._pos : self._pos + 1]

    def accept_token(self, token: str) -> Steps[bool]:
        """Consume `token` and return True if the text continues with it, else return False."""
        while True:
            ahead = self._buffer[self._pos : self._pos + len(token)]
            if ahead == token:
                self._pos += len(token)
                return True
            if not token.startswith(ahead) or not (yield from self.wait_for_text()):
                return False

    def skip_space(self) -> Steps[None]:
        yield from self.consume_run(SPACE)

    def consume_run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Consume and return the longest match of a pattern of the form `[...]*`."""
        start = self._pos - self._kept
        while True:
            match = characters.match(self._buffer, self._pos)
            assert match is not None
            self._pos = match.end()
            if self._pos < len(self._buffer) or not (yield from self.wait_for_text()):
                return self._buffer[self._kept + start : self._pos]

    def commit(self) -> None:
        """Drop the characters parsed so far from the kept text, so that they are never emitted."""
        self._kept = self._pos

    def reject_call(self, num_read: int, *, hidden: bool = False) -> None:
        """Handle kept text that is no call: emit its first `num_read` characters as text, or drop them if `hidden`, and
        parse the rest again."""
        self._num_reread += self._pos - self._kept - num_read
        self._pos = self._kept + num_read
        if not hidden:
            self.emit_text(self._buffer[self._kept : self._pos])
        self.commit()

    def emit_text_until(self, *markers: str) -> Steps[str]:
        """Emit the text before the first of `markers`; consume and return that marker, whose text is kept. Return "" if
        the text ends without a marker."""
        if self._num_reread <= MAX_REREAD:
            return (yield from self.send_until(self.emit_text, *markers))
        yield from self.emit_rest_as_text()
        return ""

    def send_until(self, send: Callable[[str], None], *markers: str) -> Steps[str]:
        """Do as `emit_text_until`, but give the text to `send`."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            match = pattern.search(self._buffer, self._pos)
            end = match.start() if match else len(self._buffer) - self._held_back(markers)
            send(self._buffer[self._pos : end])
            self._pos = self._kept = end
            if match:
                self._pos = match.end()
                return match.group()
            if not (yield from self.wait_for_text()):
                send(self._buffer[self._pos :])
                self._pos = self._kept = len(self._buffer)
                return ""

    def emit_rest_as_text(self) -> Steps[None]:
        while True:
            self.emit_text(self._buffer[self._pos :])
            self._pos = self._kept = len(self._buffer)
            if not (yield from self.wait_for_text()):
                return

    def _held_back(self, markers: tuple[str, ...]) -> int:
        """Number of characters at the end of the buffer that may be the start of a marker."""
        longest = min(max(map(len, markers)) - 1, len(self._buffer) - self._pos)
        for num in range(longest, 0, -1):
            tail = self._buffer[-num:]
            if any(marker.startswith(tail) for marker in markers):
                return num
        return 0
