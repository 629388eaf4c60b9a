"""`ToolCallParser`: base of the parsers of all tool call formats: text around calls, and calls written as JSON.

No generated text is lost: characters that looked like a call and are none become text, and a call that breaks off keeps
the arguments generated so far. White space around calls is emitted only if text follows it.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from octavo_server.output_parsing.events import TextDelta, ToolCallArguments, ToolCallStart
from octavo_server.output_parsing.json_scanner import BARE_VALUE, JsonScanner
from octavo_server.output_parsing.streaming_parser import SPACE, Steps, StreamingParser
from octavo_server.output_parsing.tool_grammar import CallNotation

ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(slots=True, kw_only=True)
class _JsonCall:
    """State of a call while its members are parsed. The call opens (is reported) once its name is known and its
    arguments start. `early_arguments`: arguments that preceded the name."""

    accepts_key: Callable[[str], bool]
    accepts_name: Callable[[str], bool]
    name: str = ""
    early_arguments: str | None = None
    is_open: bool = False


class ToolCallParser(StreamingParser):
    """`markers`: strings that stand around calls; the detokenizer must keep those of them that are special tokens.
    `notations`: how a grammar writes calls; none if that is unknown. `beginnings`: an answer of calls begins with one
    of these strings, any other answer is text; None: calls may appear anywhere. `tools`: name of each tool -> schema of
    its arguments."""

    markers: ClassVar[tuple[str, ...]] = ()
    notations: ClassVar[tuple[CallNotation, ...]] = ()

    def __init__(
        self,
        new_id: Callable[[], str],
        tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        beginnings: frozenset[str] | None = None,
    ) -> None:
        super().__init__()
        self.num_calls = 0
        self.has_text = False
        self.tools = tools
        self.is_whole = beginnings is not None
        self._beginnings = beginnings or frozenset()
        self._new_id = new_id
        self._space = ""

    def parse(self) -> Steps[None]:
        yield from self.parse_calls()
        if self._space and not self.num_calls:
            self._events.append(TextDelta(self._space))

    @abstractmethod
    def parse_calls(self) -> Steps[None]:
        """Parse text and calls to the end of the answer."""

    def emit_text(self, text: str) -> None:
        text = self._space + text
        if self.num_calls and not self.has_text:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self.has_text = True
            self._events.append(TextDelta(shown))

    def emit_text_until(self, *markers: str) -> Steps[str]:
        if not self.is_whole:
            return (yield from super().emit_text_until(*markers))
        self.emit_text((yield from self.consume_run(SPACE)))
        self.commit()
        for marker in markers:
            if (self.num_calls or marker in self._beginnings) and (yield from self.accept_token(marker)):
                return marker
        yield from self.emit_rest_as_text()
        return ""

    def start_call(self, name: str, call_id: str | None = None) -> None:
        self._events.append(ToolCallStart(self.num_calls, call_id or self._new_id(), name))
        self.num_calls += 1
        self.commit()

    def add_arguments(self, text: str) -> None:
        """Add text to the arguments of the latest call."""
        if text:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))
        self.commit()

    def parse_json_call(
        self,
        *,
        accepts_key: Callable[[str], bool] = lambda key: True,
        accepts_name: Callable[[str], bool] = lambda name: True,
        needs_arguments: bool = False,
    ) -> Steps[bool]:
        """Parse `{"name": ..., "arguments": {...}}`; return False, and keep the text, if it is not a call."""
        call = _JsonCall(accepts_key=accepts_key, accepts_name=accepts_name)
        if not (yield from self.accept_token("{")):
            return False
        yield from self.skip_space()
        while not (yield from self.accept_token("}")):
            if not (yield from self._parse_member(call)):
                break
        else:
            if call.name and not call.is_open and not needs_arguments:
                self._open(call, "{}")
            if call.is_open:
                self.commit()
        if call.is_open:
            self._pos = self._kept
        return call.is_open

    def parse_json_calls(self) -> Steps[bool]:
        """Parse a JSON list of calls; return False if it has no call. The text after the last call is not consumed."""
        num_before = self.num_calls
        yield from self.accept_token("[")
        while True:
            yield from self.skip_space()
            if not (yield from self.parse_json_call()):
                break
            yield from self.skip_space()
            if not (yield from self.accept_token(",")):
                break
        if self.num_calls == num_before:
            return False
        if (yield from self.accept_token("]")):
            self.commit()
        self._pos = self._kept
        return True

    def _parse_member(self, call: _JsonCall) -> Steps[bool]:
        """Parse one member of the call's object, and a comma after it; False if it is malformed or the text ends."""
        key = yield from self._parse_key()
        if key is None or not (call.is_open or call.accepts_key(key)):
            return False
        if call.is_open:
            yield from self._parse_value()
        elif key == "name":
            call.name = (yield from self._parse_string()) or ""
            if not call.name or not call.name.isprintable() or not call.accepts_name(call.name):
                return False
            if call.early_arguments is not None:
                self._open(call, call.early_arguments)
        elif key not in ARGUMENT_KEYS:
            yield from self._parse_value()
        elif call.name:
            self._open(call, "")
            yield from self.parse_arguments()
        else:
            call.early_arguments = yield from self._complete_arguments()
        yield from self.skip_space()
        if not (yield from self.accept_token(",")):
            return (yield from self.peek_char()) == "}"
        yield from self.skip_space()
        if call.is_open:
            self.commit()
        return True

    def _open(self, call: _JsonCall, arguments: str) -> None:
        call.is_open = True
        self.start_call(call.name)
        self.add_arguments(arguments)

    def parse_arguments(self) -> Steps[None]:
        """Parse the arguments of a call: emit an object as it arrives, and any other value once it is complete."""
        if (yield from self.peek_char()) != "{":
            self.add_arguments((yield from self._complete_arguments()))
            return
        scanner = JsonScanner()
        while True:
            text, self._pos = scanner.scan(self._buffer, self._pos)
            self.add_arguments(text)
            if scanner.is_done:
                return
            if not (yield from self.wait_for_text()):
                self.add_arguments(scanner.held_back())
                return

    def _complete_arguments(self) -> Steps[str]:
        """Parse the arguments to their end and return them as JSON text. Some models write null for no arguments, or a
        string that contains the JSON text of the arguments."""
        written = yield from self._parse_value()
        if written == "null":
            return "{}"
        try:
            inner: str = json.loads(written) if written.startswith('"') else ""
            inner.encode()
            return inner if inner and isinstance(json.loads(inner), dict) else written
        except (ValueError, RecursionError):
            return written

    def _parse_key(self) -> Steps[str | None]:
        key = yield from self._parse_string()
        yield from self.skip_space()
        if not (yield from self.accept_token(":")):
            return None
        yield from self.skip_space()
        return key

    def _parse_string(self) -> Steps[str | None]:
        if (yield from self.peek_char()) != '"':
            return None
        try:
            return str(json.loads((yield from self._parse_value())))
        except (ValueError, RecursionError):
            return None

    def _parse_value(self) -> Steps[str]:
        first = yield from self.peek_char()
        if not first or first not in '{["':
            return (yield from self.consume_run(BARE_VALUE))
        scanner, pieces = JsonScanner(), []
        while True:
            text, self._pos = scanner.scan(self._buffer, self._pos)
            pieces.append(text)
            if scanner.is_done or not (yield from self.wait_for_text()):
                return "".join(pieces) + scanner.held_back()
