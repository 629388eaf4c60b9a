"""Tool call formats by the names that `--tool-call-parser` accepts."""

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from octavo_server.output_parsing.pythonic import PythonicParser
from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tagged import TAGGED, tagged_parser
from octavo_server.output_parsing.tool_call_parser import ARGUMENT_KEYS, ToolCallParser
from octavo_server.output_parsing.tool_grammar import CallNotation, json_call

START, END = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9

_NAME = re.compile(r"[\w.-]*")
PYTHON_TAG = "<|python_tag|>"
KEY = "parameters"
_KEYS = frozenset({"name", "type", "id", *ARGUMENT_KEYS})
_CALL, _BETWEEN = json_call(KEY), 'ws ";" ws'


class Llama3JsonParser(ToolCallParser):
    """Llama 3.1, 3.2, 3.3: `{"name": ..., "parameters": {...}}`, separated by semicolons.

    A call has no markers, except that `<|python_tag|>` may precede it, so JSON that is part of the text must not be
    taken for a call: an object is a call only if it has a name and arguments; after other text, a tool must also have
    that name. If the request has a response format, an object is a call only if it begins as the grammar writes calls.
    """

    markers = (PYTHON_TAG,)
    notations = (
        CallNotation(call=_CALL, between=_BETWEEN),
        CallNotation(marker=PYTHON_TAG, before="ws", call=_CALL, between=_BETWEEN),
    )

    def parse_calls(self) -> Steps[None]:
        while marker := (yield from self.emit_text_until(PYTHON_TAG, "{")):
            if marker == PYTHON_TAG:
                self.commit()
                yield from self.skip_space()
                if (yield from self.peek_char()) != "{":
                    self.reject_call(0)
                    continue
                self.commit()
            else:
                self._pos -= 1
                if self.is_whole and not (yield from self._is_call_ahead()):
                    yield from self.emit_rest_as_text()
                    return
            any_name_allowed = marker == PYTHON_TAG or not self.has_text
            if not (yield from self._call(any_name_allowed)):
                self.reject_call(1)

    def _is_call_ahead(self) -> Steps[bool]:
        """Return whether the text continues with a call of a tool, at the first character that decides it."""
        names = [f'"{name}"' for name in self.tools]
        for expected in (["{"], ['"name"'], [":"], names, [","], [f'"{KEY}"']):
            yield from self.skip_space()
            for token in expected:
                if (yield from self.accept_token(token)):
                    break
            else:
                self._pos = self._kept
                return False
        self._pos = self._kept
        return True

    def _call(self, any_name_allowed: bool) -> Steps[bool]:
        is_call = yield from self.parse_json_call(
            accepts_key=_KEYS.__contains__,
            accepts_name=lambda name: any_name_allowed or name in self.tools,
            needs_arguments=True,
        )
        if is_call:
            yield from self.skip_space()
            if (yield from self.accept_token(";")):
                self.commit()
            self._pos = self._kept
        return is_call


def new_mistral_id() -> str:
    """Make an id of nine letters or digits: Mistral's templates reject any other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS]` and a JSON list of calls, or, since 2025, `[TOOL_CALLS]name[ARGS]{...}` for each call.

    The newer form may omit `[ARGS]` or add a `[CALL_ID]`. The markers are special tokens and never become text.
    """

    markers = (TOOL_CALLS, CALL_ID, ARGS)
    notations = (
        CallNotation(
            marker=TOOL_CALLS, before='ws "[" ws', call=json_call("arguments"), between='ws "," ws', after='ws "]"'
        ),
        CallNotation(
            marker=TOOL_CALLS,
            call=rf'"NAME" ("{CALL_ID}" /[A-Za-z0-9]{{{ID_LENGTH}}}/)? "{ARGS}"? ARGUMENTS',
            between=f'"{TOOL_CALLS}"',
        ),
    )

    def parse_calls(self) -> Steps[None]:
        while (yield from self.emit_text_until(TOOL_CALLS)):
            yield from self.skip_space()
            first = yield from self.peek_char()
            if first == "[":
                is_call = yield from self.parse_json_calls()
            elif first == "{":
                is_call = yield from self.parse_json_call()
            else:
                is_call = yield from self._parse_named_call()
            if not is_call:
                self.reject_call(len(TOOL_CALLS), hidden=True)

    def _parse_named_call(self) -> Steps[bool]:
        name = yield from self.consume_run(_NAME)
        yield from self.skip_space()
        call_id = (yield from self.consume_run(_NAME)) if (yield from self.accept_token(CALL_ID)) else None
        yield from self.accept_token(ARGS)
        yield from self.skip_space()
        if not name or (yield from self.peek_char()) != "{":
            return False
        self.start_call(name, call_id)
        yield from self.parse_arguments()
        return True


class HermesParser(ToolCallParser):
    """Hermes 2 and 3, Qwen 2.5, Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Calls may appear anywhere in the text. Some models omit the end marker, or write several calls between two markers.
    """

    markers = (START, END)
    notations = (
        CallNotation(
            marker=START,
            before="ws",
            call=json_call("arguments"),
            between=f'ws "{END}" ws "{START}" ws',
            after=f'ws "{END}"',
        ),
    )

    def parse_calls(self) -> Steps[None]:
        marker = yield from self.emit_text_until(START)
        while marker:
            yield from self.skip_space()
            if not (yield from self.parse_json_call()):
                self.reject_call(len(START))
                marker = yield from self.emit_text_until(START)
                continue
            marker = yield from self._after_call()

    def _after_call(self) -> Steps[str]:
        while True:
            self.commit()
            yield from self.skip_space()
            if (yield from self.peek_char()) != "{" or not (yield from self.parse_json_call()):
                break
        self._pos = self._kept
        marker = yield from self.emit_text_until(START, END)
        return marker if marker != END else (yield from self.emit_text_until(START))


def new_call_id() -> str:
    return f"chatcmpl-tool-{uuid4().hex}"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Format in which a model writes calls. `parser_type`: parser of one answer. `new_id`: makes an id for a call, of a
    kind that the model's template accepts."""

    parser_type: type[ToolCallParser]
    new_id: Callable[[], str] = new_call_id


TOOL_PARSERS = {
    "hermes": ToolCallFormat(HermesParser),
    "llama3_json": ToolCallFormat(Llama3JsonParser),
    "mistral": ToolCallFormat(MistralParser, new_mistral_id),
    "pythonic": ToolCallFormat(PythonicParser),
    **{name: ToolCallFormat(tagged_parser(*rows)) for name, rows in TAGGED.items()},
}
