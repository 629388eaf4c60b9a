"""Reads the tensors of a safetensors checkpoint by offset, each into its own memory: peak memory is one tensor.

A suspended generator keeps its local variables alive, so a tensor is yielded without being assigned to a variable.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from octavo_engine.sources.safetensors_header import SafeTensor, read_safetensors
from octavo_engine.weights.fresh_memory import fresh_tensor
from octavo_engine.wire.errors import StartupError

READ_BYTES = 2**20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def iter_safetensors(
    path: Path, *, advance: Callable[[int], None], is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    tensors = sorted(read_safetensors(path).values(), key=lambda tensor: tensor.offset)
    with path.open("rb", buffering=0) as file:
        for info in tensors:
            if not is_wanted(info.name):
                advance(info.num_bytes)
                continue
            file.seek(info.offset)
            yield info.name, _read(path, file, info, advance)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of a file, which `[...]` reads."""

    path: Path
    info: SafeTensor
    advance: Callable[[int], None]

    def __getitem__(self, _: EllipsisType) -> Tensor:
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.info.offset)
            return _read(self.path, file, self.info, self.advance)


def lazy_safetensors(path: Path, *, advance: Callable[[int], None]) -> Iterator[tuple[str, LazyTensor]]:
    for info in read_safetensors(path).values():
        yield info.name, LazyTensor(path, info, advance)


def _read(path: Path, file: FileIO, info: SafeTensor, advance: Callable[[int], None]) -> Tensor:
    """Read a tensor in several reads, each of which shows progress."""
    raw = fresh_tensor((info.num_bytes,), torch.uint8)
    buffer = memoryview(raw.numpy().data)
    done = 0
    while done < info.num_bytes:
        count = file.readinto(buffer[done : done + READ_BYTES])
        if not count:
            raise StartupError(f"{path}: truncated: tensor {info.name!r} ends beyond the file.")
        advance(count)
        done += count
    return tensor_of_bytes(raw, info)


def tensor_of_bytes(raw: Tensor, info: SafeTensor) -> Tensor:
    return raw.view(_DTYPES[info.dtype]).view(info.shape)
