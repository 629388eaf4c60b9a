"""The logits head: fp32 logits from hidden rows, by the model's own matrix or the embedding's, maybe soft-capped.

A 16-bit product rounds logits to steps of 0.125 between 16 and 32: unequal tokens tie, and a greedy choice turns on
their ids. Where the matrix is still there row by row (tied to the embedding), the largest logits are computed again
in fp32. Rounding is monotonic, so they are the largest either way.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear

REFINED = 8


class LogitsHead(Layer):
    def __init__(self, linear: Linear, *, softcap: float | None = None, tied: Tensor | None = None) -> None:
        super().__init__()
        self.linear, self.softcap, self.tied = linear, softcap, tied

    def __call__(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        logits = self.linear(hidden).float()
        if self.tied is not None and self.tied.dtype != torch.float32:
            refine_largest(logits, hidden, self.tied)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


def refine_largest(
    logits: Float[Tensor, "rows vocab"], hidden: Float[Tensor, "rows hidden"], weight: Float[Tensor, "vocab hidden"]
) -> None:
    """Replace each row's `REFINED` largest logits by their fp32 products, in place."""
    ids = logits.topk(min(REFINED, logits.shape[1]), sorted=False).indices
    exact = torch.bmm(weight[ids].float(), hidden.float()[:, :, None])
    logits.scatter_(1, ids, exact[:, :, 0])
