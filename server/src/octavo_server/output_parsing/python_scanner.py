"""One argument of a call in Python's notation: where its value ends, and what it is in JSON.

Nothing is run: values are literals, read by `ast.literal_eval`; what is none stays as its source text, in a string.
"""

import ast
import json
import re
import warnings

_RUN = re.compile(r"""[^'"\\\n()\[\]{},]+""")
_STRING_RUN = re.compile(r"""[^'"\\\n]+""")
_JSON_WORDS = ("true", "false", "null")


class PythonScanner:
    """Follows a value to the comma or parenthesis after it, which isn't part of it."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._quote = ""
        self._after_backslash = False

    def scan(self, text: str, pos: int) -> tuple[str, int]:
        """What the value has from `pos` on, and where that ends. Bare newlines within strings are escaped."""
        pieces: list[str] = []
        while pos < len(text) and not self.is_done:
            if self._after_backslash:
                self._after_backslash = False
            elif run := (_STRING_RUN if self._quote else _RUN).match(text, pos):
                pieces.append(run.group())
                pos = run.end()
                continue
            elif self._ends_at(text[pos]):
                self.is_done = True
                break
            pieces.append("\\n" if self._quote and text[pos] == "\n" else text[pos])
            pos += 1
        return "".join(pieces), pos

    def _ends_at(self, char: str) -> bool:
        """Also takes note of the character."""
        if char == "\\":
            self._after_backslash = True
        elif self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif self._depth == 0:
            return char in ",)]}"
        elif char in ")]}":
            self._depth -= 1
        return False


def as_json(source: str) -> str:
    source = source.strip()
    if source in _JSON_WORDS:
        return source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python doesn't know
            value = ast.literal_eval(source)
        return _dumped(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _dumped(source)


def _dumped(value: object) -> str:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text
