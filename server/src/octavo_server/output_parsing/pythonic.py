"""`pythonic` (Llama 3.2 and 4, ToolACE): the whole answer is a Python list of calls, `[weather(city="Oslo"), now()]`.

Each argument has a name, and its value is emitted as JSON once it is complete. Text after the list is emitted as text.
"""

import json
import re

from octavo_server.output_parsing.python_scanner import PythonScanner, to_json
from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ToolCallParser

START, END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"[\w.-]*")
_KEYWORD = re.compile(r"\w*")


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
