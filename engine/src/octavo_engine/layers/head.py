"""The logits head: fp32 logits from hidden rows, by the model's own matrix or the embedding's, optionally soft-capped.

Sums are not rounded to 16 bits: between 16 and 32 bf16 has steps of 0.125, so different logits would become equal and a
greedy choice would depend on the token ids.
"""

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear


class LogitsHead(Layer):
    def __init__(self, linear: Linear, *, softcap: float | None = None) -> None:
        super().__init__()
        self.linear, self.softcap = linear, softcap

    def __call__(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        logits = self.linear.wide(hidden)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
