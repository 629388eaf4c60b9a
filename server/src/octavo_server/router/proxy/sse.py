"""`SSEFramer` cuts an event stream into whole frames, so that a broken stream never ends in half a frame."""

import re
from typing import Literal

from octavo_server.anthropic.errors import error_event
from octavo_server.openai import sse
from octavo_server.openai.errors import describe

#: A longer frame is relayed in pieces. Real frames are far shorter.
MAX_FRAME_BYTES = 1024 * 1024
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')
_LAST_EVENTS = (
    *(b"event: response.completed", b"event: response.incomplete", b"event: response.failed"),
    b"event: message_stop",
)

#: `chunks`: chat and text completions. `events`: the Responses API, whose events have names. `messages`: Anthropic's.
Dialect = Literal["chunks", "events", "messages"]


class SSEFramer:
    __slots__ = ("_latest", "_partial", "dialect")

    def __init__(self, dialect: Dialect = "chunks") -> None:
        self.dialect = dialect
        self._partial = b""
        self._latest = b""

    def feed(self, data: bytes) -> bytes:
        if self._partial:
            data, self._partial = self._partial + data, b""
        if not data.endswith((b"\n\n", b"\r\n\r\n")) and len(data) < MAX_FRAME_BYTES:
            end = _end_of_last_frame(data)
            data, self._partial = data[:end], data[end:]
        if data:
            self._latest = data
        return data

    def rest(self) -> bytes:
        """Return the bytes of the incomplete last frame, to be sent when the stream ends properly."""
        return self._partial

    @property
    def has_ended(self) -> bool:
        """True once the stream's terminal frame was returned: a broken connection then loses nothing."""
        last = self._latest.rstrip().rsplit(b"\n\n", 1)[-1]
        return last == b"data: [DONE]" or last.startswith(_LAST_EVENTS)

    def failure(self, error: Exception) -> bytes:
        if self.dialect == "chunks":
            return sse.error_frame(error) + sse.DONE
        if self.dialect == "messages":
            return error_event(error)
        described = describe(error)
        numbers = _SEQUENCE_NUMBER.findall(self._latest)
        number = int(numbers[-1]) + 1 if numbers else 0
        event = {"type": "error", "code": described.code or "server_error", "message": described.message, "param": None}
        return sse.named_frame("error", event | {"sequence_number": number})


def _end_of_last_frame(data: bytes) -> int:
    """Position after the last whole frame in `data`; 0 if there is none."""
    ends = (data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data)
    return max(ends, default=0)
