"""Chooses the tokens of a step's rows, and ranks tokens, in one call of a C++ kernel (docs/reference/sampling.md)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.ops.native_library import kernels_for


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """Parameters of a draw, one element per row; on the host.

    `temperature`: 0 for the largest logit. `top_k`: 0 is off. `keys`: of the noise.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint64]

    def least_scaled(self) -> npt.NDArray[np.float32]:
        """Return ln(min_p): min-p excludes lower scaled logits; minus infinity: min-p is off."""
        logarithms = np.full(len(self.min_p), -np.inf)
        return np.log(self.min_p, out=logarithms, where=self.min_p > 0, dtype=np.float64).astype(np.float32)

    def inverse_temperature(self) -> npt.NDArray[np.float32]:
        """Return 1 / temperature; 1 for greedy rows."""
        divisor: npt.NDArray[np.float32] = np.where(self.temperature > 0, self.temperature, np.float32(1))
        return np.reciprocal(divisor)

    def packed(self) -> npt.NDArray[np.int32]:
        """Return [rows, 8]: key and top_p, of 64 bits each, 1 / temperature (greedy: 0), ln(min_p), top_k, nothing."""
        packed = np.zeros((len(self.keys), 8), dtype=np.int32)
        packed[:, 0:2] = self.keys.view(np.int32).reshape(-1, 2)
        packed[:, 2:4] = self.top_p.view(np.int32).reshape(-1, 2)
        packed[:, 4] = np.where(self.temperature > 0, self.inverse_temperature(), np.float32(0)).view(np.int32)
        packed[:, 5] = self.least_scaled().view(np.int32)
        packed[:, 6] = np.minimum(self.top_k, np.iinfo(np.int32).max)
        return packed

    def take(self, rows: npt.NDArray[np.int64]) -> "DrawParams":
        return DrawParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            keys=self.keys[rows],
        )


def sample_natively(logits: Float[Tensor, "rows vocab"], params: DrawParams) -> Int[Tensor, " rows"] | None:
    """Return a token per row, -1 where the maximum is not finite; None if no kernel supports these logits."""
    library = kernels_for(logits) if logits.dtype == torch.float32 else None
    if library is None or logits.stride(1) != 1:
        return None
    tokens = torch.empty(len(logits), dtype=torch.int64)
    least_scaled = params.least_scaled()
    library.octavo_sample(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        len(logits),
        params.temperature.ctypes.data,
        params.top_k.ctypes.data,
        params.top_p.ctypes.data,
        least_scaled.ctypes.data,
        params.keys.ctypes.data,
        tokens.data_ptr(),
        torch.get_num_threads(),
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
        logits.data_ptr(),
        logits.stride(0),
        vocab,
        len(logits),
        ids.data_ptr(),
        ids.shape[1],
        ranks.data_ptr(),
        torch.get_num_threads(),
    )
    return ranks
