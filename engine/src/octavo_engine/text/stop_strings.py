"""`StopStrings`: ends a text at the first stop string, however the text is split into pieces.

The first stop string is the one that is complete first; if several end at the same character, the longest. A stream can
follow this rule without waiting, and it does not depend on how the text is split.
Text that may be the start of a stop string is held back, at most the length of the longest stop string less one
character, so that no part of a stop string is returned. If the stop string is included (`include`), no text is held
back.
"""

from collections.abc import Sequence


class StopStrings:
    """After a match, `matched` is the stop string, and `push` and `flush` return empty strings."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._tail = ""  # the end of the text so far that may be the start of a stop string

    def push(self, text: str) -> str:
        """Add text; return the text that can be output now."""
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
        """Return the text that was held back; call it at the end of the text."""
        tail, self._tail = self._tail, ""
        return "" if self._include else tail

    def _first_match(self, text: str) -> tuple[int, int] | None:
        starts = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _held_from(self, text: str) -> int:
        """Return the start of the longest suffix of `text` that is a prefix of a stop string."""
        held = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), held)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, held)
            held = start if start >= 0 else held
        return held
