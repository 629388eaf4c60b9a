"""`StreamingParser`: reads a text that comes in pieces, by a generator that waits where it needs more to decide.

A subclass writes `read` as if the whole text were there, with `yield from` before each look ahead. What it decides
never depends on where the pieces were cut, because each look waits until it is certain. Text that a decision is
waiting for is kept, so that it can still be shown as text if the decision is that it was nothing else.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeVar

from octavo_server.output_parsing.events import OutputEvent, merge_adjacent

T = TypeVar("T")
#: A step that may have to wait for more text, and then gives a T.
Steps = Generator[None, None, T]

#: Characters of an answer that may be read twice, as what began like a call was none. Then all is text: an answer made
#: of nothing but beginnings would cost the square of its length.
MAX_REREAD = 1 << 16

_SPACE = re.compile(r"\s*")


class StreamingParser(ABC):
    """`push` and `finish` return what became certain. After `finish` nothing is held back."""

    def __init__(self) -> None:
        self._buffer = ""
        self._pos = 0  # the next character to read
        self._kept = 0  # what lies between here and `_pos` may yet be shown as text
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
        found, self._events = merge_adjacent(self._events), []
        return found

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Reads to the end of the text."""

    @abstractmethod
    def emit_text(self, text: str) -> None:
        """Emits what is neither marker nor call."""

    def wait_for_text(self) -> Steps[bool]:
        """Waits; False at the end of the text."""
        if self._ended:
            return False
        yield
        return not self._ended

    def peek_char(self) -> Steps[str]:
        """The next character, not consumed; "" at the end of the text."""
        while self._pos == len(self._buffer):
            if not (yield from self.wait_for_text()):
                break
        return self._buffer[self._pos : self._pos + 1]

    def accept_token(self, token: str) -> Steps[bool]:
        """Consumes `token` if it comes next."""
        while True:
            ahead = self._buffer[self._pos : self._pos + len(token)]
            if ahead == token:
                self._pos += len(token)
                return True
            if not token.startswith(ahead) or not (yield from self.wait_for_text()):
                return False

    def skip_space(self) -> Steps[None]:
        yield from self.consume_run(_SPACE)

    def consume_run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Consumes what a pattern of the form `[...]*` matches, to its end."""
        start = self._pos - self._kept
        while True:
            match = characters.match(self._buffer, self._pos)
            assert match is not None
            self._pos = match.end()
            if self._pos < len(self._buffer) or not (yield from self.wait_for_text()):
                return self._buffer[self._kept + start : self._pos]

    def commit(self) -> None:
        """What was read so far will never be shown as text."""
        self._kept = self._pos

    def reject_call(self, num_read: int, *, hidden: bool = False) -> None:
        """It was no call after all: back to the first `num_read` kept characters, which are text (or `hidden`)."""
        self._num_reread += self._pos - self._kept - num_read
        self._pos = self._kept + num_read
        if not hidden:
            self.emit_text(self._buffer[self._kept : self._pos])
        self.commit()

    def emit_text_until(self, *markers: str) -> Steps[str]:
        """Says the text before the first of the markers; that is consumed, kept and returned. "" at the end."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while self._num_reread <= MAX_REREAD:
            match = pattern.search(self._buffer, self._pos)
            end = match.start() if match else len(self._buffer) - self._held_back(markers)
            self.emit_text(self._buffer[self._pos : end])
            self._pos = self._kept = end
            if match:
                self._pos = match.end()
                return match.group()
            if not (yield from self.wait_for_text()):
                self.emit_text(self._buffer[self._pos :])
                self._pos = self._kept = len(self._buffer)
                return ""
        yield from self.emit_rest_as_text()
        return ""

    def emit_rest_as_text(self) -> Steps[None]:
        while True:
            self.emit_text(self._buffer[self._pos :])
            self._pos = self._kept = len(self._buffer)
            if not (yield from self.wait_for_text()):
                return

    def _held_back(self, markers: tuple[str, ...]) -> int:
        """How many characters at the end may be the start of a marker."""
        longest = min(max(map(len, markers)) - 1, len(self._buffer) - self._pos)
        for num in range(longest, 0, -1):
            tail = self._buffer[-num:]
            if any(marker.startswith(tail) for marker in markers):
                return num
        return 0
