"""Finds the end of a JSON value that arrives in chunks, without building the value.

The scanner repairs two mistakes that models make within strings, so that the text can be parsed: control characters
without an escape (newlines in code), and backslashes before characters that JSON does not escape (`\\'`, `\\d`).
"""

import re

#: A number, true, false or null: a value without brackets or quotes.
BARE_VALUE = re.compile(r"[\w.+-]*")

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_OTHER_RUN = re.compile(r'[^"{}\[\]]+')
_ESCAPABLE = frozenset('"\\/bfnrtu')
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonScanner:
    """Scans one object, array or string; the first character scanned must be the first of the value."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._after_backslash = False

    def scan(self, text: str, pos: int) -> tuple[str, int]:
        """Return the repaired text of the part of the value that begins at `pos`, and the position after that part."""
        pieces: list[str] = []
        while pos < len(text) and not self.is_done:
            if self._after_backslash:
                pieces.append(_escaped(text[pos]))
                self._after_backslash = False
                pos += 1
            elif run := (_STRING_RUN if self._in_string else _OTHER_RUN).match(text, pos):
                pieces.append(run.group())
                pos = run.end()
            else:
                pieces.append(self._mark(text[pos]))
                pos += 1
        return "".join(pieces), pos

    def held_back(self) -> str:
        """The backslash that `scan` has not returned yet, or an empty string, for a text that ends within the value."""
        return "\\" if self._after_backslash else ""

    def _mark(self, char: str) -> str:
        if char == '"':
            self._in_string = not self._in_string
        elif self._in_string and char == "\\":
            self._after_backslash = True
            return ""
        elif self._in_string:
            return _ESCAPES.get(char, f"\\u{ord(char):04x}")
        else:
            self._depth += 1 if char in "{[" else -1
        self.is_done = self._depth == 0 and not self._in_string
        return char


def _escaped(char: str) -> str:
    if char in _ESCAPABLE:
        return "\\" + char
    return char if char == "'" else "\\\\" + _ESCAPES.get(char, char)
