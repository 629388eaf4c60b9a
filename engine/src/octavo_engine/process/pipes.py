"""Messages in a pipe: each follows its length in 4 bytes."""

import os

_LENGTH_BYTES = 4


def read_message(fd: int) -> bytes | None:
    """Read the next message; None once the other end is closed."""
    length = _read_exactly(fd, _LENGTH_BYTES)
    return None if length is None else _read_exactly(fd, int.from_bytes(length, "little"))


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data
