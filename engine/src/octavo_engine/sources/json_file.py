"""Reads one JSON object from a model folder; errors name the file."""

import json
from pathlib import Path
from typing import Any

from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.wire.errors import StartupError

CHUNK_BYTES = 2**20


def read_json_object(path: Path, *, max_bytes: int | None = None, advance: Advance = ignore_progress) -> dict[str, Any]:
    """Read a file whose size may be limited. Raises StartupError."""
    try:
        value = json.loads(_read(path, max_bytes, advance).decode("utf-8"))
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: holds a JSON {type(value).__name__}, but must hold an object.")
    return value


def _read(path: Path, max_bytes: int | None, advance: Advance) -> bytes:
    data = bytearray()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            advance(len(chunk))
            data += chunk
            if max_bytes is not None and len(data) > max_bytes:
                raise StartupError(f"{path}: has more than {max_bytes} bytes, the limit: leave out what is unused.")
    return bytes(data)


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
