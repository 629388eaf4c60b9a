"""The logits head: fp32 logits from hidden rows, by the model's own matrix or the embedding's, optionally soft-capped.

Sums are not rounded to 16 bits: between 16 and 32 bf16 has steps of 0.125, so different logits would become equal and a
greedy choice would depend on the token ids. Each rank has some rows of the matrix; rank 0 gathers the logits.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.shard import vocabulary_shares


class LogitsHead(Layer):
    def __init__(self, linear: Linear, *, softcap: float | None = None) -> None:
        super().__init__()
        self.linear, self.softcap = linear, softcap

    def __call__(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits. Ranks other than 0, which sample no tokens, get none: their rows have no columns."""
        logits = self.linear.wide(hidden)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return gather_logits(logits, self.linear)


def gather_logits(logits: Float[Tensor, "rows part"], head: Linear) -> Float[Tensor, "rows vocab"]:
    """Return the logits of all ranks on rank 0, and rows without columns on other ranks."""
    group = head.spec.shard.group
    if group.size == 1:
        return logits
    sizes = [len(share) for share in vocabulary_shares(group, head.spec.outs[0])]
    parts = group.gather(F.pad(logits, (0, max(sizes) - logits.shape[1])))
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1) if parts else logits[:, :0]
