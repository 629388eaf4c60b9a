"""The logits that tokens are drawn from, for `logprobs_mode` processed_logprobs and processed_logits only.

The sampler itself never builds them: it draws without masking every token that top-k and top-p exclude.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def processed_logits(
    logits: Float[Tensor, "rows vocab"],
    *,
    temperature: Float[Tensor, " rows"],
    min_p: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"],
    top_p: Float[Tensor, " rows"],
) -> Float[Tensor, "rows vocab"]:
    """Apply temperature (0: none, greedy), min-p, top-k (0: off) and top-p; excluded tokens get minus infinity."""
    never = float("-inf")
    logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    logits = logits.masked_fill(logits < (logits.amax(-1) + min_p.log())[:, None], never)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    excluded = torch.arange(logits.shape[1], device=logits.device) >= limit
    weights = values.masked_fill(excluded, never).double().softmax(-1)
    excluded |= (weights.cumsum(-1) - weights >= top_p[:, None]) & (top_p[:, None] < 1.0)
    return logits.masked_fill(torch.zeros_like(excluded).scatter_(1, ids, excluded), never)
