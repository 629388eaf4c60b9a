"""Keeps the logits of the tokens whose bit is set, and says which rows have a token left: one pass over them.

A row of words has a bit for each token, lowest first, as grammar libraries write them. The torch form is the reference
and serves where there is no kernel; it needs several passes and a byte for each token.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from octavo_engine.ops.native_library import kernels_for

WORD_BITS = 32


def apply_token_bitmask(
    logits: Float[Tensor, "rows vocab"], rows: Int[Tensor, " shaped"], words: Int[Tensor, "shaped words"]
) -> Bool[Tensor, " shaped"]:
    """Row `rows[i]` of the logits becomes -inf wherever `words[i]` has no bit. False: nothing above -inf is left."""
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
    words = words.to(logits.device)
    bits = words[:, :, None] >> torch.arange(WORD_BITS, dtype=words.dtype, device=logits.device) & 1
    blocked = bits.flatten(1)[:, : logits.shape[1]] == 0
    kept = logits[rows.to(logits.device)].masked_fill_(blocked, float("-inf"))
    logits[rows.to(logits.device)] = kept
    return kept.amax(-1) > float("-inf")
