"""One terminal for several processes: each line with the name of whoever said it, in a colour of its own.

Where lines are JSON objects the name goes into the object, so that they stay JSON. Whole lines only: what a process
says bit by bit is put together first.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TextIO

COLOURS = (36, 33, 32, 35, 34, 31)  # of ANSI terminals
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
        """Nobody reading is no reason to end: what is served goes on."""
        shown = f'{{"source": {json.dumps(name)}, {line[1:]}' if _is_json(line) else f"{self._prefixes[name]} {line}"
        with suppress(BrokenPipeError):
            self._stream.write(shown + "\n")
            self._stream.flush()


def _painted(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def _is_json(line: str) -> bool:
    return line.startswith('{"') and line.endswith("}")


class LineSplitter:
    """Bytes as they come, lines as they are complete; one without an end is cut at `MAX_LINE_BYTES`."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[str]:
        *whole, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            whole.append(self._pending)
            self._pending = b""
        return map(_text, whole)

    def rest(self) -> Iterator[str]:
        """What the last line holds, if it has no end."""
        rest, self._pending = self._pending, b""
        return map(_text, [rest] if rest else [])


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
