"""`mistral`: `[TOOL_CALLS]` and a JSON list of calls, or, since 2025, `[TOOL_CALLS]name[ARGS]{...}` for each call.

The newer form may omit `[ARGS]` or add a `[CALL_ID]`. The markers are special tokens and never become text.
"""

import re
import secrets
import string

from octavo_server.output_parsing.streaming_parser import Steps
from octavo_server.output_parsing.tool_call_parser import ToolCallParser
from octavo_server.output_parsing.tool_grammar import CallNotation, json_call

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9

_NAME = re.compile(r"[\w.-]*")


def new_mistral_id() -> str:
    """Make an id of nine letters or digits: Mistral's templates reject any other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))


class MistralParser(ToolCallParser):
    markers = (START, CALL_ID, ARGS)
    notations = (
        CallNotation(
            marker=START, before='ws "[" ws', call=json_call("arguments"), between='ws "," ws', after='ws "]"'
        ),
        CallNotation(
            marker=START,
            call=rf'"NAME" ("{CALL_ID}" /[A-Za-z0-9]{{{ID_LENGTH}}}/)? "{ARGS}"? ARGUMENTS',
            between=f'"{START}"',
        ),
    )

    def parse_calls(self) -> Steps[None]:
        while (yield from self.emit_text_until(START)):
            yield from self.skip_space()
            first = yield from self.peek_char()
            if first == "[":
                is_call = yield from self.parse_json_calls()
            elif first == "{":
                is_call = yield from self.parse_json_call()
            else:
                is_call = yield from self._parse_named_call()
            if not is_call:
                self.reject_call(len(START), hidden=True)

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
