"""Applies bitmasks of allowed tokens to logits and reports which rows have a token left, in one pass.

A row of words has one bit per token, lowest first, as grammar libraries write them. The torch function is the reference
and the fallback without a kernel; it needs several passes and one byte per token.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from octavo_engine.ops.native_library import kernels_for

WORD_BITS = 32


def apply_token_bitmask(
    logits: Float[Tensor, "rows vocab"], rows: Int[Tensor, " shaped"], words: Int[Tensor, "shaped words"]
) -> Bool[Tensor, " shaped"]:
    """Set row `rows[i]` of the logits to -inf where `words[i]` has no bit; return whether each row has a token."""
    library = kernels_for(logits) if logits.dtype == torch.float32 else None
    if library is None or logits.stride(1) != 1:
        return apply_token_bitmask_reference(logits, rows, words)
    words = words.contiguous()
    has_token = torch.empty(len(rows), dtype=torch.bool)
    library.octavo_apply_token_bitmask(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        rows.data_ptr(),
        len(rows),
        words.data_ptr(),
        words.shape[1],
        has_token.data_ptr(),
        torch.get_num_threads(),
    )
    return has_token


def apply_token_bitmask_reference(
    logits: Float[Tensor, "rows vocab"], rows: Int[Tensor, " shaped"], words: Int[Tensor, "shaped words"]
) -> Bool[Tensor, " shaped"]:
    bits = words[:, :, None] >> torch.arange(WORD_BITS, dtype=words.dtype, device=logits.device) & 1
    blocked = bits.flatten(1)[:, : logits.shape[1]] == 0
    kept = logits[rows].masked_fill_(blocked, float("-inf"))
    logits[rows] = kept
    return kept.amax(-1) > float("-inf")
