"""Reads safetensors headers: a file's tensors and their positions, checked against the file's size.

It imports no torch. It replaces the library's reader, whose errors for a truncated file do not name the tensor; and
reading each tensor by offset limits peak memory to one tensor (the pages of a mapped file count as resident memory).
Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.wire.errors import StartupError

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS, MAX_ELEMENTS = 8, 2**48
MAX_NUMBER = 2**63 - 1

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeTensor:
    """One tensor. `offset` is from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_safetensors(
    path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES, advance: Advance = ignore_progress
) -> dict[str, SafeTensor]:
    """Read a header. Raises StartupError in one line with the file and the tensor."""
    try:
        with path.open("rb") as file:
            entries, data_start = _read_header(path, file, max_header_bytes)
            size = path.stat().st_size
            advance(data_start)
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from error
    return {
        name: _checked(path, name, entry, data_start, size) for name, entry in entries.items() if name != "__metadata__"
    }


def _read_header(path: Path, file: BinaryIO, max_bytes: int) -> tuple[dict[str, Any], int]:
    prefix = file.read(8)
    num_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else max_bytes + 1
    header = file.read(num_bytes) if num_bytes <= max_bytes else b""
    if len(header) < num_bytes:
        raise StartupError(
            f"{path}: corrupt or truncated safetensors file: its header is incomplete, or longer than "
            f"{max_bytes} bytes."
        )
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: corrupt safetensors file: its header is not JSON.") from error
    if not isinstance(entries, dict):
        raise StartupError(f"{path}: corrupt safetensors file: its header is not a JSON object.")
    return entries, 8 + num_bytes


def _checked(path: Path, name: str, entry: Any, data_start: int, size: int) -> SafeTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, end)
        sound = isinstance(dtype, str) and all(isinstance(n, int) and 0 <= n <= MAX_NUMBER for n in numbers)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise StartupError(f"{path}: tensor {name!r}: its header entry is corrupt.")
    if dtype not in DTYPE_BYTES:
        raise StartupError(f"{path}: tensor {name!r} has the unsupported dtype {dtype!r}.")
    if len(shape) > MAX_DIMENSIONS or math.prod(shape) > MAX_ELEMENTS:
        raise StartupError(
            f"{path}: tensor {name!r} has {len(shape)} dimensions of up to {max(shape)}: at most {MAX_DIMENSIONS} and "
            f"2^48 elements are supported."
        )
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise StartupError(f"{path}: tensor {name!r}: {end - start} bytes do not hold {dtype} of shape {list(shape)}.")
    if data_start + end > size:
        raise StartupError(
            f"{path}: truncated: tensor {name!r} ends at byte {data_start + end}, the file has {size} bytes."
        )
    return SafeTensor(name=name, dtype=dtype, shape=shape, offset=data_start + start, num_bytes=end - start)
