"""Reads one JSON object from a model folder; errors name the file."""

import json
from pathlib import Path
from typing import Any

from octavo_engine.wire.errors import StartupError


def read_json_object(path: Path, *, max_bytes: int | None = None) -> dict[str, Any]:
    try:
        if max_bytes is not None and (size := path.stat().st_size) > max_bytes:
            raise StartupError(f"{path}: has {size} bytes, more than {max_bytes}, the limit: leave out what is unused.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: holds a JSON {type(value).__name__}, but must hold an object.")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
