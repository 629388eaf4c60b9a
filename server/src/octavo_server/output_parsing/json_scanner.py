"""`JsonScanner` finds the end of a JSON value that arrives in chunks, without building the value; `CustomInput` decodes
the text that the arguments of a custom tool hold.

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

#: Opening of a custom tool's arguments. Some models write the input as a bare string.
_OPENING = re.compile(r'\s*(?:\{\s*"input"\s*:\s*)?"')
_OPENINGS = ('{"input":"', '"')
#: Most characters of an opening; longer ones are white space without end.
_MAX_OPENING = 256
#: Whole characters and escapes of a string; a broken `\\u` stands for itself.
_UNITS = re.compile(r'(?:[^"\\]++|\\[^u]|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))*+')
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


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


class CustomInput:
    """Decodes the arguments `{"input": "..."}` of one call, chunk by chunk. Other arguments stay as they are."""

    def __init__(self) -> None:
        self._held = ""
        self._is_string: bool | None = None  # None: not known yet
        self._is_done = False
        self._half = ""  # first half of a surrogate pair

    def push(self, text: str) -> str:
        """Return the part of the input that became certain by the next chunk of the arguments."""
        self._held += text
        if self._is_string is None:
            self._open()
        if self._is_string:
            return self._next_of_string()
        return self._release() if self._is_string is False else ""

    def finish(self) -> str:
        """Return the rest of arguments that are not as expected; half an escape is dropped."""
        return "" if self._is_string else self._release()

    def _open(self) -> None:
        opening = self._held[:_MAX_OPENING]
        if match := _OPENING.match(opening):
            self._is_string = True
            self._held = self._held[match.end() :]
        elif len(opening) == _MAX_OPENING or not any(o.startswith("".join(opening.split())) for o in _OPENINGS):
            self._is_string = False

    def _next_of_string(self) -> str:
        if self._is_done:
            self._held = ""
            return ""
        match = _UNITS.match(self._held)
        assert match is not None
        self._held = self._held[match.end() :]
        self._is_done = self._held.startswith('"')
        text = self._half + _ESCAPE.sub(_unescape, match.group())
        self._half = text[-1] if not self._is_done and "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text.removesuffix(self._half)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text


def _unescape(escape: re.Match[str]) -> str:
    code, char = escape.groups()
    return chr(int(code, 16)) if code else _ESCAPED.get(char, escape.group())
