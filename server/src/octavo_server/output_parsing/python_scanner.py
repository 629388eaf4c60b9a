"""Finds the end of an argument's value in a call in Python notation, and converts the value to JSON.

No code is run: `ast.literal_eval` parses literals; any other source text becomes a JSON string.
"""

import ast
import json
import re
import warnings

_RUN = re.compile(r"""[^'"\\\n()\[\]{},]+""")
_STRING_RUN = re.compile(r"""[^'"\\\n]+""")
_JSON_WORDS = ("true", "false", "null")


class PythonScanner:
    """Scans one value, up to the comma or closing bracket that follows the value and is not part of it."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._quote = ""
        self._after_backslash = False

    def scan(self, text: str, pos: int) -> tuple[str, int]:
        """Return the text of the part of the value that begins at `pos`, with escaped newlines within strings, and the
        position after that part."""
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
        """True if the value ends before `char`; otherwise update the nesting depth and the quote."""
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


def to_json(source: str) -> str:
    source = source.strip()
    if source in _JSON_WORDS:
        return source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            value = ast.literal_eval(source)
        return _dump_utf8(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _dump_utf8(source)


def _dump_utf8(value: object) -> str:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text
