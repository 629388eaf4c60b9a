"""Chooses the tokens of a step's rows, and ranks tokens, in one call of a C++ kernel (docs/reference/sampling.md)."""

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.ops.native_library import kernels_for

#: A row's sampling parameters, as kernels read them. `key`: key of the random noise. `inverse_temperature`: 0 is
#: greedy. `least_scaled`: ln(min_p); tokens with lower scaled logits are excluded. `top_k`: 0 is off.
DRAW = np.dtype(
    {
        "names": ["key", "top_p", "inverse_temperature", "least_scaled", "top_k", "temperature"],
        "formats": ["u8", "f8", "f4", "f4", "i4", "f4"],
    }
)
DrawParams = npt.NDArray[np.void]  # its dtype is DRAW


def make_draw(*, temperature: float, top_k: int, top_p: float, min_p: float, key: int = 0) -> DrawParams:
    """Return the parameters of a row, a scalar array."""
    divisor, least = np.float32(temperature), np.float32(min_p)
    inverse = 1 / divisor if divisor > 0 else 0.0
    least_scaled = np.log(least, dtype=np.float64) if least > 0 else -np.inf
    return np.array((key, top_p, inverse, least_scaled, min(top_k, np.iinfo(np.int32).max), divisor), dtype=DRAW)


def sample_natively(logits: Float[Tensor, "rows vocab"], params: DrawParams) -> Int[Tensor, " rows"] | None:
    """Return a token per row, -1 where the maximum is not finite; None if no kernel supports these logits."""
    library = kernels_for(logits) if logits.dtype == torch.float32 else None
    if library is None or logits.stride(1) != 1:
        return None
    tokens = torch.empty(len(logits), dtype=torch.int64)
    library.octavo_sample(
        *(logits.data_ptr(), logits.stride(0), logits.shape[1], len(logits)),
        *(params.ctypes.data, tokens.data_ptr(), torch.get_num_threads()),
    )
    return tokens


def ranks_natively(logits: Float[Tensor, "rows vocab"], ids: Int[Tensor, "rows ids"]) -> Int[Tensor, "rows ids"] | None:
    """Return the ranks of tokens, equal ones by id; None if no kernel supports these logits."""
    library = kernels_for(logits) if logits.dtype == torch.float32 else None
    if library is None or logits.stride(1) != 1:
        return None
    ids, vocab = ids.contiguous(), logits.shape[1]
    assert not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < vocab  # the kernel checks no bounds
    ranks = torch.empty_like(ids)
    library.octavo_ranks(
        *(logits.data_ptr(), logits.stride(0), vocab, len(logits)),
        *(ids.data_ptr(), ids.shape[1], ranks.data_ptr(), torch.get_num_threads()),
    )
    return ranks
