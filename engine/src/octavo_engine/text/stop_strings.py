"""`StopSearch`: ends a text at the first stop string, however the text is split into pieces.

The first stop string is the one that is complete first; if several end at the same character, the longest. A stream can
follow this rule without waiting, and it does not depend on how the text is split.
Text that may be the start of a stop string is held back, at most the length of the longest stop string less one
character, so that no part of a stop string is returned. If the stop string is included (`include`), no text is held
back.

The state of a search is the longest end of the text that begins a stop string. A character extends it, or takes
characters from its front until it begins a stop string again. Each character is added once and taken once, so the work
for a character does not depend on the length of the text that is held back.
"""

from bisect import bisect_left
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, which the searches of its sequences share."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._sorted = sorted(set(stops))
        self._longest_first = tuple(sorted(self._sorted, key=len, reverse=True))
        self._first_chars = frozenset(stop[0] for stop in self._sorted)
        self._last_chars = frozenset(stop[-1] for stop in self._sorted)

    def __bool__(self) -> bool:
        return bool(self._sorted)

    def begins(self, text: str) -> bool:
        """Return True if a stop string begins with this text."""
        if text[0] not in self._first_chars:
            return False
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def longest_at_end(self, text: str) -> str | None:
        if text[-1] not in self._last_chars or not text.endswith(self._longest_first):
            return None
        return next(stop for stop in self._longest_first if text.endswith(stop))


class StopSearch:
    """The search in one text. After a match, `matched` is the stop string, and `push` and `flush` return ""."""

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""  # the longest end of the text so far that begins a stop string

    def push(self, text: str) -> str:
        """Add text; return the text that can be output now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        num_held = len(self._held)
        text, start = self._held + text, 0
        seen = num_held if self._include else 0
        for end in range(num_held + 1, len(text) + 1):
            while start < end and not self._stops.begins(text[start:end]):
                start += 1
            self.matched = self._stops.longest_at_end(text[start:end]) if start < end else None
            if self.matched is not None:
                self._held = ""
                return text[seen : end if self._include else end - len(self.matched)]
        self._held = text[start:]
        return text[seen:] if self._include else text[:start]

    def flush(self) -> str:
        """Return the text that was held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return "" if self._include else held
