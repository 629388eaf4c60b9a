"""The logits that tokens are drawn from, for `logprobs_mode` processed_logprobs and processed_logits only."""

import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.sampling import DrawParams
from octavo_engine.sampling.draws import kept_tokens


def processed_logits(logits: Float[Tensor, "rows vocab"], params: DrawParams) -> Float[Tensor, "rows vocab"]:
    """Apply temperature (0: none, greedy), min-p, top-k and top-p; excluded tokens get minus infinity."""
    temperature = torch.from_numpy(params.temperature).to(logits.device)[:, None]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    return scaled.masked_fill_(~kept_tokens(logits, params), float("-inf"))
