"""Shows the output of several processes on one terminal: each line gets the name of its process, in its own colour.

In a line that is a JSON object the name becomes a field, so that the line stays JSON. Only complete lines are shown.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TextIO

COLOURS = (36, 33, 32, 35, 34, 31)  # ANSI colour codes
MAX_LINE_BYTES = 64 * 1024


class Console:
    def __init__(self, stream: TextIO, names: Sequence[str], *, has_colour: bool) -> None:
        self._stream = stream
        width = max(map(len, names))
        self._prefixes = {
            name: _painted(f"{name:{width}} |", COLOURS[i % len(COLOURS)]) if has_colour else f"{name:{width}} |"
            for i, name in enumerate(names)
        }

    def show(self, name: str, line: str) -> None:
        """Print a line of the process `name`; drop it if the terminal is closed, so that the processes keep serving."""
        shown = f'{{"source": {json.dumps(name)}, {line[1:]}' if _is_json(line) else f"{self._prefixes[name]} {line}"
        with suppress(BrokenPipeError):
            self._stream.write(shown + "\n")
            self._stream.flush()


def _painted(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def _is_json(line: str) -> bool:
    return line.startswith('{"') and line.endswith("}")


class LineSplitter:
    """Splits bytes into complete lines; a line longer than `MAX_LINE_BYTES` is split."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[str]:
        *whole, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            whole.append(self._pending)
            self._pending = b""
        return map(_text, whole)

    def rest(self) -> Iterator[str]:
        """Return the text after the last line end, once the output has ended."""
        rest, self._pending = self._pending, b""
        return map(_text, [rest] if rest else [])


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
