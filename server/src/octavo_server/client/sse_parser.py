"""`SSEParser`: parses server-sent events from chunks of any size and returns the data of each complete event.

OpenAI-compatible servers use a small part of the format: one or more `data:` lines per event, comments, and an empty
line after each event. Line ends may be LF, CRLF or CR.
"""

DONE = b"[DONE]"


class SSEParser:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that `piece` completes. A CR at its end waits, as it may be half of a CRLF."""
        text = self._rest + piece
        held = b"\r" if text.endswith(b"\r") else b""
        lines = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
