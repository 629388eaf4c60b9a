"""Builds blocks of Q4_0, Q5_0 and Q8_0, whose values are scale * signed integer, from these numbers."""

import torch
from jaxtyping import Float16, Int8, UInt8
from torch import Tensor

from octavo_engine.ops.native_blocks import BlockFormat


def signed_blocks(
    values: Int8[Tensor, "out blocks 32"], scales: Float16[Tensor, "out blocks"], block_format: BlockFormat
) -> UInt8[Tensor, "out row_bytes"]:
    """Return rows of blocks. Values are in [-8, 7] for Q4_0, in [-16, 15] for Q5_0."""
    parts = [scales.contiguous().view(torch.uint8).view(*scales.shape, 2)]
    if block_format.name == "Q8_0":
        parts.append(values.view(torch.uint8))
    else:
        codes = (values + (8 if block_format.name == "Q4_0" else 16)).view(torch.uint8)
        if block_format.name == "Q5_0":
            powers = 2 ** torch.arange(8, dtype=torch.uint8)
            parts.append(((codes >> 4).view(*scales.shape, 4, 8) * powers).sum(-1, dtype=torch.uint8))
        low = codes & 15
        parts.append(low[..., :16] | low[..., 16:] << 4)
    return torch.cat(parts, -1).flatten(1)
