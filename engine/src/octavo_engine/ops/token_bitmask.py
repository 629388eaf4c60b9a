"""Applies bitmasks of allowed tokens to logits, in one pass.

A row of words has one bit per token, lowest first, as grammar libraries write them. The torch function is the reference
and the fallback without a kernel; it needs several passes and one byte per token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.ops.native_library import kernels_for

WORD_BITS = 32


def apply_token_bitmask(
    logits: Float[Tensor, "rows vocab"], rows: Int[Tensor, " shaped"], words: Int[Tensor, "shaped words"]
) -> None:
    """Set row `rows[i]` of the logits to -inf where `words[i]` has no bit."""
    library = kernels_for(logits) if logits.dtype == torch.float32 else None
    if library is None or logits.stride(1) != 1:
        apply_token_bitmask_reference(logits, rows, words)
        return
    words = words.contiguous()
    library.octavo_apply_token_bitmask(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        rows.data_ptr(),
        len(rows),
        words.data_ptr(),
        words.shape[1],
        torch.get_num_threads(),
    )


def apply_token_bitmask_reference(
    logits: Float[Tensor, "rows vocab"], rows: Int[Tensor, " shaped"], words: Int[Tensor, "shaped words"]
) -> None:
    bits = words[:, :, None] >> torch.arange(WORD_BITS, dtype=words.dtype, device=logits.device) & 1
    blocked = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(blocked, float("-inf"))
