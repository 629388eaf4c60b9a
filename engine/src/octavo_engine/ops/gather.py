"""Rows of a table by their numbers: token embeddings and rotation tables."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.native_library import kernels_for


@dataclass(frozen=True, slots=True)
class TablePart:
    """The rows of a larger table (`num_rows` rows in all) that this rank's table holds: from row `first` on."""

    first: int
    num_rows: int


def gather_rows(
    table: Float[Tensor, "rows size"], ids: Int[Tensor, " tokens"], scale: float = 1.0, part: TablePart | None = None
) -> Float[Tensor, "tokens size"]:
    """Return rows of `table` times `scale` in a new tensor. In the kernel, an id without a row gives a row of NaN.

    `part`: ids refer to the larger table; rows that are not in `table` are zero.
    """
    library = kernels_for(table)
    if library is None or ids.dtype != torch.int64 or not (table.is_contiguous() and ids.is_contiguous()):
        rows = F.embedding(ids, table) if part is None else _rows_of_part(table, ids - part.first)
        return rows if scale == 1.0 else rows.mul_(scale)
    part = part or TablePart(0, len(table))
    out = torch.empty((len(ids), table.shape[1]), dtype=table.dtype)
    library.octavo_gather(
        *(table.data_ptr(), *table.shape, part.first, part.num_rows),
        *(ids.data_ptr(), len(ids), scale, out.data_ptr()),
        *(table.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return out


def _rows_of_part(table: Tensor, rows: Tensor) -> Tensor:
    if len(table) == 0:
        return table.new_zeros(len(rows), table.shape[1])
    is_elsewhere = (rows < 0) | (rows >= len(table))
    return F.embedding(rows.masked_fill(is_elsewhere, 0), table).masked_fill_(is_elsewhere[:, None], 0)
