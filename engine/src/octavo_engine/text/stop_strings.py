"""`StopStrings`: ends a text at the first stop string, however the text was cut into pieces.

First means: the one that is complete first; of those that end at the same character, the longest. That is the only
rule that a stream can follow without waiting, and it doesn't depend on where the pieces were cut.
Text that may be the start of a stop string is held back, so that no part of one is ever shown; never more than the
longest stop string less one character. Where the stop string is to be shown (`include`), nothing is held back.
"""

from collections.abc import Sequence


class StopStrings:
    """After a match `matched` names it, `push` and `flush` return nothing more."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._tail = ""  # the end of the text so far that may be the start of a stop string

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        seen = len(self._tail) if self._include else 0
        text = self._tail + text
        match = self._first_match(text)
        if match is not None:
            start, end = match
            self.matched, self._tail = text[start:end], ""
            return text[seen : end if self._include else start]
        held = self._held_from(text)
        self._tail = text[held:]
        return text[seen:] if self._include else text[:held]

    def flush(self) -> str:
        """The text held back; no more will come."""
        tail, self._tail = self._tail, ""
        return "" if self._include else tail

    def _first_match(self, text: str) -> tuple[int, int] | None:
        found = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start) for start, stop in found if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _held_from(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop string begins with."""
        held = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), held)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, held)
            held = start if start >= 0 else held
        return held
