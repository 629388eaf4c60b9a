"""GGUF blocks -> torch, a slice of rows at a time: no intermediate holds more than SLICE_BYTES of float32.

The arithmetic of quantised types is the `gguf` library's (its `quants.dequantize`; not its slow file reader). Rows
may be scattered while they are written, which undoes llama.cpp's interleaving of q and k without another copy. Copies
are numpy's where they can be: torch would split each over its threads, which on a busy machine costs more than it wins.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from octavo_engine.sources.gguf_header import GGUFTensor
from octavo_engine.wire.errors import StartupError

SLICE_BYTES = 16 << 20

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def read_gguf_tensor(
    path: Path,
    file: BinaryIO,
    info: GGUFTensor,
    *,
    dtype: torch.dtype | None = None,
    rows: NDArray[np.int64] | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Tensor:
    """The tensor in `dtype` (by default float32 where quantised, else as stored). `rows[i]` is where row i goes.

    Raises StartupError naming file, tensor and type where the type can't be dequantised or the file ends early.
    """
    out = torch.empty(info.shape, dtype=dtype or _PLAIN.get(info.type.name, torch.float32))
    num_rows = info.shape[0] if len(info.shape) > 1 or rows is not None else 1
    if not out.numel():
        return out
    row_bytes = info.num_bytes // num_rows
    step = max(1, SLICE_BYTES * num_rows // (out.numel() * 4))
    file.seek(info.offset)
    for start in range(0, num_rows, step):
        count = min(step, num_rows - start)
        raw = _read(path, file, info, count * row_bytes)
        target = slice(start, start + count) if rows is None else rows[start : start + count]
        _write(out.view(num_rows, -1), target, _decoded(path, info, raw.reshape(count, row_bytes)))
        advance(raw.size)
    return out


def _read(path: Path, file: BinaryIO, info: GGUFTensor, num_bytes: int) -> NDArray[np.uint8]:
    raw = np.fromfile(file, dtype=np.uint8, count=num_bytes)
    if raw.size != num_bytes:
        raise StartupError(f"{path}: truncated: tensor {info.name!r} ends beyond the file.")
    return raw


def _decoded(path: Path, info: GGUFTensor, raw: NDArray[np.uint8]) -> Tensor:
    plain = _PLAIN.get(info.type.name)
    if plain is not None:
        return torch.from_numpy(raw).view(plain)
    try:
        return torch.from_numpy(dequantize(raw, GGMLQuantizationType(info.type.id)))
    except (NotImplementedError, ValueError) as error:
        raise StartupError(
            f"{path}: tensor {info.name!r} has the GGUF type {info.type.name}, which can't be dequantised."
        ) from error


def _write(flat: Tensor, target: slice | NDArray[np.int64], part: Tensor) -> None:
    if flat.dtype == part.dtype and flat.dtype != torch.bfloat16:
        flat.numpy()[target] = part.numpy()
    else:
        index: Any = target if isinstance(target, slice) else torch.from_numpy(target)
        flat[index] = part.to(flat.dtype)


def interleaved_rows(num_rows: int, heads: int) -> NDArray[np.int64]:
    """Where each stored row of a llama q or k belongs: rows 2i and 2i + 1 of a head are its i and i + half."""
    half = num_rows // heads // 2
    return np.arange(num_rows).reshape(heads, 2, half).swapaxes(1, 2).ravel()
