"""How an answer ends that can't go on: an error with its status before the head is out, an event in a stream, else a
connection that is cut.

An event stream goes on frame by frame: the beginning of a frame is of no use to a client before its end, so it waits
for that here, and a stream that breaks never ends in half a frame. Nothing that is complete waits.
"""

import re
from typing import Literal

from octavo_server.openai import sse
from octavo_server.openai.errors import describe

#: What none of them reaches in earnest: beyond it a frame is passed on in pieces.
MAX_FRAME_BYTES = 1024 * 1024
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")

Dialect = Literal["chunks", "events"]


class SSEFramer:
    """Bytes of an event stream as they come, whole frames as they go."""

    __slots__ = ("_begun", "_latest")

    def __init__(self) -> None:
        self._begun = b""
        self._latest = b""

    def feed(self, data: bytes) -> bytes:
        if self._begun:
            data, self._begun = self._begun + data, b""
        if not data.endswith((b"\n\n", b"\r\n\r\n")) and len(data) < MAX_FRAME_BYTES:
            end = _last_end(data)
            data, self._begun = data[:end], data[end:]
        if data:
            self._latest = data
        return data

    def rest(self) -> bytes:
        """At a proper end: what came without a frame's end."""
        return self._begun

    @property
    def has_ended(self) -> bool:
        """The last frame of all is out, whatever becomes of the connection."""
        last = self._latest.rstrip().rsplit(b"\n\n", 1)[-1]
        return last == b"data: [DONE]" or last.startswith(_LAST_EVENTS)

    def failure(self, error: Exception, dialect: Dialect) -> bytes:
        if dialect == "chunks":
            return sse.error_frame(error) + sse.DONE
        described = describe(error)
        found = _SEQUENCE_NUMBER.findall(self._latest)
        number = int(found[-1]) + 1 if found else 0
        event = {"type": "error", "code": "server_error", "message": described.message, "param": None}
        return sse.named_frame("error", event | {"sequence_number": number})


def _last_end(data: bytes) -> int:
    """Of the last whole frame in it; 0 where there is none."""
    ends = (data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data)
    return max(ends, default=0)
