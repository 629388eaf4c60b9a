"""Reads GGUF headers (versions 2 and 3, little-endian): key-values, and the position of each tensor.

It uses neither tensor data nor numpy or torch. It replaces the `gguf` library's `GGUFReader`, which needs 2.4-3.2 s to
open SmolLM2 (it makes numpy views of each of 98 000 vocabulary strings); `struct` on an mmap needs a few hundredths.
Every length in the file is checked against the file's size before use, so that a truncated or corrupt file gives a
one-line error, not a crash or a 2^60-element loop.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from octavo_engine.wire.errors import StartupError

MAGIC = b"GGUF"
MAX_DIMS = 4
MAX_NESTING = 4
DEFAULT_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MIN_KEY_VALUE_BYTES = 8 + 4 + 1
_MIN_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8


class GGMLType(NamedTuple):
    """Data type of a tensor: elements and bytes of a block. `weights/gguf_tensors.py` lists how each is read."""

    id: int
    name: str
    block_elements: int
    block_bytes: int


#: Our own table, so that a header can be read without the library `gguf` (and numpy). A test keeps it equal to theirs.
GGML_TYPES: dict[int, GGMLType] = {
    entry[0]: GGMLType(*entry)
    for entry in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One tensor. `shape` is row-major as in torch (GGUF stores it reversed); `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    num_bytes: int

    @property
    def format_name(self) -> str:
        return self.type.name


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read a header. Raises StartupError, with the file and the tensor, unless it is a complete, valid GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).read()
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise StartupError(f"{path}: not a GGUF file: it is empty.") from error


class _HeaderReader:
    """A cursor over the mapped file. It only moves forward, by lengths that were checked."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._pos = 0
        self._place = "header"

    def read(self) -> GGUFFile:
        version, num_tensors, num_entries = self._preamble()
        metadata = dict(self._entry() for _ in range(num_entries))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        tensors = self._placed(infos, self._alignment(metadata))
        return GGUFFile(path=self._path, version=version, metadata=metadata, tensors=tensors)

    def _fail(self, what: str) -> StartupError:
        return StartupError(f"{self._path}: corrupt or truncated GGUF file: {what} (file has {self._size} bytes).")

    def _preamble(self) -> tuple[int, int, int]:
        magic = self._data[:4]
        if magic != MAGIC:
            raise StartupError(f"{self._path}: not a GGUF file: it starts with {magic!r}, not {MAGIC!r}.")
        self._skip(4)
        version = self._number(_U32)
        if version not in (2, 3):
            hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
            raise StartupError(f"{self._path}: GGUF version {version}{hint} is not supported, only 2 and 3.")
        num_tensors, num_entries = self._number(_U64), self._number(_U64)
        self._check_count("tensors", num_tensors, _MIN_TENSOR_INFO_BYTES)
        self._check_count("key-values", num_entries, _MIN_KEY_VALUE_BYTES)
        return version, num_tensors, num_entries

    def _skip(self, num_bytes: int) -> int:
        """Advance by `num_bytes`; return the position before."""
        start = self._pos
        if num_bytes > self._size - start:
            raise self._fail(f"{self._place} needs {num_bytes} bytes at offset {start}")
        self._pos = start + num_bytes
        return start

    def _check_count(self, what: str, count: int, min_bytes_each: int) -> None:
        if count * min_bytes_each > self._size - self._pos:
            raise self._fail(f"{self._place} declares {count} {what}, more than the file can hold")

    def _number(self, kind: struct.Struct) -> int:
        number: int = kind.unpack_from(self._data, self._skip(kind.size))[0]
        return number

    def _string(self) -> str:
        start = self._skip(self._number(_U64))
        return self._decoded(self._data[start : self._pos])

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"{self._place} holds text that isn't UTF-8") from error

    def _entry(self) -> tuple[str, Any]:
        self._place = "a key"
        key = self._string()
        self._place = f"key {key[:100]!r}"
        return key, self._value(self._number(_U32), MAX_NESTING)

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number(_U32), self._number(_U64), nesting - 1)
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, count: int, nesting: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            if nesting == 0:
                raise self._fail(f"{self._place} nests arrays deeper than {MAX_NESTING}")
            self._check_count("arrays", count, 12)
            return [self._value(kind, nesting) for _ in range(count)]
        return list(self._scalars(kind, count))

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._fail(f"{self._place} has the unknown value type {kind}")
        start = self._skip(struct.calcsize(code) * count)
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def _strings(self, count: int) -> list[str]:
        """Read strings fast, as vocabularies have 100 000 entries: bounds are checked once, at the end."""
        self._check_count("strings", count, 8)
        data, pos, unpack = self._data, self._pos, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                strings.append(data[start:pos].decode())
        except (struct.error, OverflowError) as error:
            raise self._fail(f"{self._place} ends within string {len(strings)} of {count}") from error
        except UnicodeDecodeError as error:
            raise self._fail(f"{self._place} holds text that isn't UTF-8") from error
        if pos > self._size:
            raise self._fail(f"{self._place} ends beyond the file")
        self._pos = pos
        return strings

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._fail(f"general.alignment is {alignment!r}")
        return alignment

    def _tensor_info(self) -> GGUFTensor:
        """Read one tensor's entry. Its offset is relative to the data section, which starts after the last entry."""
        self._place = "a tensor name"
        name = self._string()
        self._place = f"tensor {name[:100]!r}"
        num_dims = self._number(_U32)
        if num_dims > MAX_DIMS:
            raise self._fail(f"{self._place} has {num_dims} dimensions, at most {MAX_DIMS} are possible")
        shape = tuple(reversed([self._number(_U64) for _ in range(num_dims)]))
        type_id, relative = self._number(_U32), self._number(_U64)
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            raise StartupError(f"{self._path}: tensor {name!r} has the unsupported GGUF type {type_id}.")
        num_bytes = self._num_bytes(shape, kind)
        return GGUFTensor(name=name, shape=shape, type=kind, offset=relative, num_bytes=num_bytes)

    def _num_bytes(self, shape: tuple[int, ...], kind: GGMLType) -> int:
        if shape and shape[-1] % kind.block_elements:
            raise self._fail(
                f"{self._place} has rows of {shape[-1]}, not a multiple of {kind.name}'s block of {kind.block_elements}"
            )
        return math.prod(shape) // kind.block_elements * kind.block_bytes

    def _placed(self, infos: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
        start = -(-self._pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for info in infos:
            tensor = replace(info, offset=start + info.offset)
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                raise self._fail(f"tensor {tensor.name!r} lies at bytes {tensor.offset}-{end}")
            if tensor.name in tensors:
                raise self._fail(f"tensor {tensor.name!r} occurs twice")
            tensors[tensor.name] = tensor
        return tensors
