"""Draws from a categorical distribution by inverting its cumulative distribution with one uniform number per row.

Two orders are used. `draw_tokens` goes through the vocabulary in id order, in two levels (sums of chunks, then one
chunk), so that a row costs one pass. `draw_filtered_tokens` goes through the logits in descending order: it examines
the largest 64, and sorts only the rows whose top-k or top-p reaches further; only values are sorted, and the token is
found by its value afterwards. In both, a row's result depends only on that row, and equal logits are ordered by id.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK = 256
_FIRST_LOOK = 64
_LOG2_E = 1 / math.log(2)


def draw_tokens(logits: Float[Tensor, "rows vocab"], uniform: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Draw a token per row. `uniform`: in [0, 1), float64. Never draws a token of weight 0. Overwrites the logits."""
    rows, vocab = logits.shape
    weights = _weights_(logits, logits.amax(-1, keepdim=True))
    whole = vocab // _CHUNK * _CHUNK
    sums = weights[:, :whole].view(rows, -1, _CHUNK).sum(-1)
    sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1).double()  # [rows, chunks]
    ends = sums.cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    chunk = _first_above(ends, target)
    start = ends.gather(1, chunk) - sums.gather(1, chunk)
    fraction = ((target - start) / sums.gather(1, chunk)).clamp_(0.0, 1.0 - 2.0**-53)
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=logits.device)  # [rows, one chunk]
    inside = weights.gather(1, ids.clamp(max=vocab - 1)).double().masked_fill_(ids >= vocab, 0.0).cumsum_(-1)
    return ids.gather(1, _first_above(inside, fraction * inside[:, -1:]))[:, 0]


def draw_filtered_tokens(
    logits: Float[Tensor, "rows vocab"],
    uniform: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"],
    top_p: Float[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Draw a token per row with top-k (0: off) and top-p, which applies after renormalising over the top k.

    Each row must have a finite maximum.
    """
    rows, vocab = logits.shape
    best = logits.amax(-1, keepdim=True)
    total = _weights_(logits.clone(), best).sum(-1).double()
    value = best.clone()  # the drawn logit, and how many of its equals come before it
    offset = torch.zeros(rows, 1, dtype=torch.int64, device=logits.device)
    pending = torch.arange(rows, device=logits.device)
    for size in (min(_FIRST_LOOK, vocab), vocab):
        k, p = top_k[pending], top_p[pending]
        values = largest_values(logits[pending], size)
        cumulative, length = _nucleus(values, best[pending], total[pending], k, p, vocab)
        target = uniform[pending, None] * cumulative.gather(1, length - 1)
        at = torch.minimum(_first_above(cumulative, target), length - 1)
        value[pending] = values.gather(1, at)
        offset[pending] = at - (values > value[pending]).sum(-1, keepdim=True)
        decided = torch.where(k > 0, k <= size, length[:, 0] < size)
        pending = pending[~decided]
        if not len(pending):
            break
    return _nth_equal(logits, value, offset[:, 0])


def largest_values(values: Float[Tensor, "rows vocab"], size: int) -> Float[Tensor, "rows size"]:
    """Return each row's `size` largest values, descending. numpy sorts values without indices 10 times faster."""
    if size < values.shape[1]:
        return values.topk(size).values
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    ascending = np.sort(values.numpy(), axis=-1)
    return torch.from_numpy(np.ascontiguousarray(ascending[:, ::-1]))


def largest(values: Float[Tensor, "rows vocab"], size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest values of each row with their ids, descending, equal values by id.

    If values tie at the cut-off, it is undefined which of them are included.
    """
    if size == values.shape[1]:
        ordered, ids = values.sort(dim=-1, descending=True, stable=True)
        return ordered, ids
    ids = values.topk(size, sorted=False).indices.sort(dim=-1).values
    ordered, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _nucleus(
    values: Tensor, best: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, vocab: int
) -> tuple[Float[Tensor, "rows candidates"], Int[Tensor, "rows 1"]]:
    """Return the cumulative weights of sorted `values`, and how many of the first may be drawn (at least one)."""
    weights = _weights_(values.clone(), best)
    rank = torch.arange(values.shape[1], device=values.device)
    limit = torch.where(top_k > 0, top_k, values.shape[1])[:, None]
    weights = weights.masked_fill_(rank >= limit, 0.0)
    mass = torch.where(top_k > 0, weights.sum(-1).double(), total)[:, None]
    # All tokens of lower weight together have less weight than 1 - top_p, so none of them is in the nucleus.
    least = ((1.0 - top_p) * total / vocab)[:, None].float()
    candidates = int(((weights >= least) & (rank < limit)).sum(-1).max())
    weights, rank = weights[:, :candidates].double(), rank[:candidates]
    cumulative = weights.cumsum(-1)
    inside = (rank < limit) & ((cumulative - weights < top_p[:, None] * mass) | (top_p[:, None] >= 1.0))
    return cumulative, inside.sum(-1, keepdim=True).clamp_(min=1)


def _nth_equal(logits: Tensor, value: Float[Tensor, "rows 1"], n: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Return, per row, the n-th token (from 0) whose logit is `value`."""
    rows, ids = (logits == value).nonzero().unbind(1)
    first = torch.searchsorted(rows, torch.arange(len(logits), device=logits.device))
    return ids[first + n]


def _weights_(logits: Tensor, best: Float[Tensor, "rows 1"]) -> Tensor:
    """Compute exp(logits - best) in place, with exp2: on CPUs torch's exp takes 3 times as long, 10 times for -inf."""
    return logits.sub_(best).mul_(_LOG2_E).exp2_()


def _first_above(cumulative: Tensor, target: Tensor) -> Int[Tensor, "rows 1"]:
    """Return the index of the first cumulative weight above the target; that entry's own weight is not zero."""
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)
