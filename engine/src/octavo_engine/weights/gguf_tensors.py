"""Reads GGUF tensors a slice of rows at a time: each intermediate holds at most SLICE_BYTES of float32.

The `gguf` library's `quants.dequantize` converts quantised types; its file reader is not used, as it is slow. Rows may
be scattered while they are written, which undoes llama.cpp's interleaving of q and k without another copy.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS, QuantisedTensor
from octavo_engine.ops.single_thread import single_thread
from octavo_engine.sources.gguf_header import GGUFTensor
from octavo_engine.weights.fresh_memory import fresh_tensor
from octavo_engine.wire.errors import StartupError

SLICE_BYTES = 1 << 19

#: GGUF types that a GPU can keep as groups: their blocks have codes, an fp16 scale and perhaps an fp16 minimum.
GROUP_FORMATS = {
    "Q4_0": GroupFormat(name="Q4_0", codes="int4", group_size=32),
    "Q4_1": GroupFormat(name="Q4_1", codes="int4", group_size=32, offsets="minimums"),
    "Q8_0": GroupFormat(name="Q8_0", codes="int8", group_size=32),
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def read_gguf_tensor(
    path: Path,
    file: BinaryIO,
    info: GGUFTensor,
    *,
    dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Tensor:
    """Read a tensor as `dtype` (default: float32 if quantised, else as stored). `rows[i]`: the target of stored row i.

    Raises StartupError, with file, tensor and type, if the type cannot be dequantised or the file ends early.
    """
    out = fresh_tensor(info.shape, dtype or _PLAIN.get(info.type.name, torch.float32))
    num_rows = info.shape[0] if len(info.shape) > 1 or rows is not None else 1
    if not out.numel():
        return out
    for target, raw in _row_slices(path, file, info, num_rows, rows, advance):
        out.view(num_rows, -1)[target] = _decoded(path, info, raw).to(out.dtype)
    return out


def read_gguf_blocks(
    path: Path,
    file: BinaryIO,
    info: GGUFTensor,
    *,
    rows: Tensor | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> QuantisedTensor:
    """Read the blocks of a tensor unexpanded. `rows` as in `read_gguf_tensor`. Raises StartupError for a short file."""
    num_rows = math.prod(info.shape[:-1])
    out = fresh_tensor((num_rows, info.num_bytes // num_rows), torch.uint8)
    for target, raw in _row_slices(path, file, info, num_rows, rows, advance):
        out[target] = torch.from_numpy(raw)
    return QuantisedTensor(QUANTISED_FORMATS[info.type.name], out.view(*info.shape[:-1], -1))


def read_gguf_groups(
    path: Path,
    file: BinaryIO,
    info: GGUFTensor,
    *,
    rows: Tensor | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> GroupTensor:
    """Read a tensor [out, in] of one of `GROUP_FORMATS`, else as `read_gguf_blocks`.

    Raises StartupError for numbers that are not finite.
    """
    kept = GROUP_FORMATS[info.type.name]
    blocks = read_gguf_blocks(path, file, info, rows=rows, advance=advance).rows.view(-1, info.type.block_bytes)
    num_floats = 1 if kept.offsets == "none" else 2
    floats = blocks[:, : 2 * num_floats].contiguous().view(torch.float16).view(info.shape[0], -1, num_floats)
    if not floats.isfinite().all():
        row = int((~floats.isfinite()).flatten(1).any(1).nonzero()[0])
        raise StartupError(
            f"{path}: tensor {info.name!r}: row {row} has an infinite or NaN scale or minimum in a {kept.name} block: "
            "the file is corrupt; download or convert it again."
        )
    scales, *minimums = (each.t().contiguous() for each in floats.unbind(-1))
    codes = blocks[:, 2 * num_floats :].reshape(info.shape[0], -1)
    return GroupTensor(format=kept, codes=codes, scales=scales, offsets=minimums[0] if minimums else None)


def _row_slices(
    path: Path,
    file: BinaryIO,
    info: GGUFTensor,
    num_rows: int,
    rows: Tensor | None,
    advance: Callable[[int], None],
) -> Iterator[tuple[slice | Tensor, NDArray[np.uint8]]]:
    """Yield bytes of rows [count, row_bytes] and the rows' indices in the result."""
    row_bytes = info.num_bytes // num_rows
    step = max(1, SLICE_BYTES * num_rows // (math.prod(info.shape) * 4))
    file.seek(info.offset)
    with single_thread():
        for start in range(0, num_rows, step):
            count = min(step, num_rows - start)
            raw = _read(path, file, info, count * row_bytes)
            yield (
                slice(start, start + count) if rows is None else rows[start : start + count],
                raw.reshape(count, row_bytes),
            )
            advance(raw.size)


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
            f"{path}: tensor {info.name!r} has the GGUF type {info.type.name}, which cannot be dequantised."
        ) from error


def interleaved_rows(num_rows: int, heads: int) -> Tensor:
    """Return the target of each stored row of a llama q or k: rows 2i and 2i + 1 of a head become i and i + half."""
    half = num_rows // heads // 2
    return torch.arange(num_rows).view(heads, 2, half).transpose(1, 2).reshape(num_rows)
