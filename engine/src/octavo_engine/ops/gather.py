"""Rows of a table by their numbers: token embeddings and rotation tables."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.ops.native_library import kernels_for


def gather_rows(
    table: Float[Tensor, "rows size"], ids: Int[Tensor, " tokens"], scale: float = 1.0
) -> Float[Tensor, "tokens size"]:
    """Return rows of `table` times `scale` in a new tensor. In the kernel, an id without a row gives a row of NaN."""
    library = kernels_for(table)
    if library is None or ids.dtype != torch.int64 or not (table.is_contiguous() and ids.is_contiguous()):
        rows = F.embedding(ids, table)
        return rows if scale == 1.0 else rows.mul_(scale)
    out = torch.empty((len(ids), table.shape[1]), dtype=table.dtype)
    library.octavo_gather(
        *(table.data_ptr(), *table.shape),
        *(ids.data_ptr(), len(ids), scale, out.data_ptr()),
        *(table.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return out
