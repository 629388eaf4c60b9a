"""Draws from a categorical distribution by inverting its cumulative distribution with one uniform number per row.

Two orders are used. `draw` walks the vocabulary in id order, in two levels (sums of chunks, then one chunk), so that a
row costs one pass. `draw_filtered` walks the most likely tokens in descending order: it takes the top 64, and only the
rows whose top-k or top-p reaches further are tried again with more. Either way a row's result depends on that row
alone, and equal logits are ordered by id.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK = 256
_SIZES = (64, 1024)


def draw(logits: Float[Tensor, "rows vocab"], uniform: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """`uniform` in [0, 1), float64. A token of zero probability is never drawn."""
    rows, vocab = logits.shape
    weights = torch.zeros(rows, -(-vocab // _CHUNK) * _CHUNK, dtype=torch.float32, device=logits.device)
    torch.exp(logits - logits.amax(-1, keepdim=True), out=weights[:, :vocab])
    chunks = weights.view(rows, -1, _CHUNK)
    sums = chunks.sum(-1).double()  # [rows, chunks]
    ends = sums.cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    chunk = _first_above(ends, target)
    start = ends.gather(1, chunk) - sums.gather(1, chunk)
    fraction = ((target - start) / sums.gather(1, chunk)).clamp_(0.0, 1.0 - 2.0**-53)
    inside = chunks[torch.arange(rows, device=logits.device), chunk[:, 0]].double().cumsum(-1)
    return (chunk * _CHUNK + _first_above(inside, fraction * inside[:, -1:]))[:, 0]


def draw_filtered(
    logits: Float[Tensor, "rows vocab"],
    uniform: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"],
    top_p: Float[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """`top_k` 0: off. Top-p applies to the distribution renormalised after top-k."""
    rows, vocab = logits.shape
    best = logits.amax(-1, keepdim=True)
    total = torch.exp(logits - best).sum(-1).double()
    drawn = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    pending = torch.arange(rows, device=logits.device)
    for size in [*(s for s in _SIZES if s < vocab), vocab]:
        values, ids = largest(logits[pending], size)
        cumulative, length = _nucleus(values, best[pending], total[pending], top_k[pending], top_p[pending])
        target = uniform[pending, None] * cumulative.gather(1, length - 1)
        at = torch.minimum(_first_above(cumulative, target), length - 1)
        done = _is_complete(values, length, top_k[pending], vocab)
        drawn[pending[done]] = ids.gather(1, at)[done, 0]
        pending = pending[~done]
        if not len(pending):
            break
    return drawn


def largest(values: Float[Tensor, "rows vocab"], size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest of each row, descending, equal ones by id. At the cut, which of equals is taken is open."""
    if size == values.shape[1]:
        ordered, ids = values.sort(dim=-1, descending=True, stable=True)
        return ordered, ids
    ids = values.topk(size, sorted=False).indices.sort(dim=-1).values
    ordered, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _nucleus(
    values: Tensor, best: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Float[Tensor, "rows size"], Int[Tensor, "rows 1"]]:
    """Cumulative weights of the sorted `values`, and how many of them may be drawn (at least one)."""
    weights = torch.exp(values - best).double()
    rank = torch.arange(values.shape[1], device=values.device)
    limit = torch.where(top_k > 0, top_k, values.shape[1])[:, None]
    cumulative = weights.masked_fill(rank >= limit, 0.0).cumsum(-1)
    mass = torch.where(top_k > 0, cumulative[:, -1], total)[:, None]
    inside = (rank < limit) & ((cumulative - weights < top_p[:, None] * mass) | (top_p[:, None] >= 1.0))
    return cumulative, inside.sum(-1, keepdim=True).clamp_(min=1)


def _is_complete(values: Tensor, length: Tensor, top_k: Tensor, vocab: int) -> Tensor:
    """Whether the values seen decide the nucleus: no equal of its last member, and no more of its mass, is unseen."""
    size = values.shape[1]
    if size == vocab:
        return torch.ones(len(values), dtype=torch.bool, device=values.device)
    last = values[:, -1]
    closed = (top_k < size) & (values.gather(1, length - 1)[:, 0] > last)
    return closed | (last == float("-inf"))


def _first_above(cumulative: Tensor, target: Tensor) -> Int[Tensor, "rows 1"]:
    """Index of the first cumulative weight greater than the target: its own weight is not zero."""
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)
