"""`pythonic` (Llama 3.2 and 4, ToolACE): the whole answer is a Python list of calls, `[weather(city="Oslo"), now()]`.

Each argument has a name, and its value is emitted as JSON once it is complete. Text after the list is emitted as text.
No code is run: `ast.literal_eval` parses literals; any other value becomes a JSON string with its source text.
"""

import ast
import json
import re
import warnings

from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ToolCallParser

START, END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"[\w.-]*")
_KEYWORD = re.compile(r"\w*")
_RUN = re.compile(r"""[^'"\\\n()\[\]{},]+""")
_STRING_RUN = re.compile(r"""[^'"\\\n]+""")
_JSON_WORDS = ("true", "false", "null")


class PythonicParser(ToolCallParser):
    markers = (START, END)

    def parse_calls(self) -> Steps[None]:
        yield from self.skip_space()
        yield from self.accept_token(START)
        yield from self.skip_space()
        if (yield from self.accept_token("[")):
            yield from self._parse_list()
        self._pos = self._kept
        while (yield from self.emit_text_until(START, END)):
            self.commit()

    def _parse_list(self) -> Steps[None]:
        while True:
            yield from self.skip_space()
            if not (yield from self._parse_call()):
                return
            yield from self.skip_space()
            if (yield from self.accept_token("]")):
                self.commit()
                return
            if not (yield from self.accept_token(",")):
                return

    def _parse_call(self) -> Steps[bool]:
        """Parse one call; return False, and emit no event, if the text is not a call with named arguments."""
        name = yield from self.consume_run(_NAME)
        if not name or not (yield from self.accept_token("(")):
            return False
        yield from self.skip_space()
        if (yield from self.accept_token(")")):
            self.start_call(name)
            self.add_arguments("{}")
            return True
        keyword = yield from self._parse_keyword()
        if not keyword:
            return False
        self.start_call(name)
        opening = "{"
        while keyword:
            self.add_arguments(f"{opening}{json.dumps(keyword)}: ")
            if not (yield from self._parse_literal()):
                return True
            yield from self.accept_token(",")
            yield from self.skip_space()
            self.commit()
            opening = ", "
            keyword = yield from self._parse_keyword()
        self._pos = self._kept
        yield from self.accept_token(")")
        self.add_arguments("}")
        return True

    def _parse_keyword(self) -> Steps[str]:
        keyword = yield from self.consume_run(_KEYWORD)
        yield from self.skip_space()
        has_equals = yield from self.accept_token("=")
        return keyword if has_equals else ""

    def _parse_literal(self) -> Steps[bool]:
        """Parse one value. If the text ends within the value, emit its source text so far and return False."""
        scanner, pieces = PythonScanner(), []
        while True:
            text, self._pos = scanner.scan(self._buffer, self._pos)
            pieces.append(text)
            if scanner.is_done or not (yield from self.wait_for_text()):
                break
        source = "".join(pieces)
        self.add_arguments(to_json(source) if scanner.is_done else source.strip())
        return scanner.is_done


class PythonScanner:
    """Scans one argument's value, up to the comma or closing bracket that follows it."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._quote = ""
        self._after_backslash = False

    def scan(self, text: str, pos: int) -> tuple[str, int]:
        """Return the next part of the value's text, which begins at `pos`, and the position after it. Newlines within
        strings are escaped."""
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
