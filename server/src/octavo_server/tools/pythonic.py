"""`pythonic` (Llama 3.2 and 4, ToolACE): the whole answer is a Python list of calls, `[weather(city="Oslo"), now()]`.

Arguments are named, and shown value by value, as JSON. Text after the list is text.
"""

import json
import re

from octavo_server.reading.pieces import Steps
from octavo_server.tools.call_reader import CallReader
from octavo_server.tools.python_scan import PythonScan, as_json

START, END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"[\w.-]*")
_KEYWORD = re.compile(r"\w*")


class PythonicReader(CallReader):
    markers = (START, END)

    def read_calls(self) -> Steps[None]:
        yield from self.skip_space()
        yield from self.accept(START)
        yield from self.skip_space()
        if (yield from self.accept("[")):
            yield from self._list()
        self._pos = self._kept
        while (yield from self.text_until(START, END)):
            self.commit()

    def _list(self) -> Steps[None]:
        while True:
            yield from self.skip_space()
            if not (yield from self._call()):
                return
            yield from self.skip_space()
            if (yield from self.accept("]")):
                self.commit()
                return
            if not (yield from self.accept(",")):
                return

    def _call(self) -> Steps[bool]:
        """False, with nothing shown, if this is no call with named arguments."""
        name = yield from self.run_of(_NAME)
        if not name or not (yield from self.accept("(")):
            return False
        yield from self.skip_space()
        if (yield from self.accept(")")):
            self.open_call(name)
            self.argue("{}")
            return True
        keyword = yield from self._keyword()
        if not keyword:
            return False
        self.open_call(name)
        opening = "{"
        while keyword:
            self.argue(f"{opening}{json.dumps(keyword)}: ")
            if not (yield from self._literal()):
                return True
            yield from self.accept(",")
            yield from self.skip_space()
            self.commit()
            opening = ", "
            keyword = yield from self._keyword()
        self._pos = self._kept
        yield from self.accept(")")
        self.argue("}")
        return True

    def _keyword(self) -> Steps[str]:
        keyword = yield from self.run_of(_KEYWORD)
        yield from self.skip_space()
        is_one = yield from self.accept("=")
        return keyword if is_one else ""

    def _literal(self) -> Steps[bool]:
        """False if the text ends within it: then what there is of it is shown as it stands."""
        scan, pieces = PythonScan(), []
        while True:
            text, self._pos = scan.take(self._buffer, self._pos)
            pieces.append(text)
            if scan.is_done or not (yield from self.more()):
                break
        source = "".join(pieces)
        self.argue(as_json(source) if scan.is_done else source.strip())
        return scan.is_done
