"""Log-probabilities of the chosen and the most likely tokens, or their logits, from logits of any processing stage.

Tokens are ordered by their values, equal ones by their ids. Lists and ranks follow this order, which does not depend on
the other rows of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.devices.transfers import Fetch, fetch_now
from octavo_engine.ops.sampling import DrawParams, ranks_natively
from octavo_engine.sampling.draws import kept_tokens
from octavo_engine.wire.records import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities that are being computed and copied. `counts`: likely tokens to report for each row."""

    chosen: Callable[[], Tensor]
    own: Callable[[], Tensor]  # of the chosen tokens
    ranks: Callable[[], Tensor]
    top_values: Callable[[], Tensor]
    top_ids: Callable[[], Tensor]
    counts: list[int]

    def entries(self) -> list[TokenLogprobs]:
        """Wait for the values; return them by row."""
        columns = (self.chosen, self.own, self.ranks, self.top_ids, self.top_values)
        rows = zip(*(column().tolist() for column in columns), self.counts, strict=True)
        return [
            TokenLogprobs([token, *top_ids[:n]], [value, *top_values[:n]], rank)
            for token, value, rank, top_ids, top_values, n in rows
        ]


def processed_logits(logits: Float[Tensor, "rows vocab"], params: DrawParams) -> Float[Tensor, "rows vocab"]:
    """Apply temperature (0: none, greedy), min-p, top-k and top-p; excluded tokens get minus infinity."""
    temperature = torch.from_numpy(params["temperature"]).to(logits.device)[:, None]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    return scaled.masked_fill_(~kept_tokens(logits, params), float("-inf"))


def token_logprobs(
    logits: Float[Tensor, "rows vocab"],
    chosen: Int[Tensor, " rows"],
    num_top: list[int],
    *,
    as_logits: bool = False,
    fetch: Fetch = fetch_now,
) -> PendingLogprobs:
    """Start to compute log-probabilities per row, or logits with `as_logits`.

    `num_top[i]`: likely tokens to report beside the chosen token; -1 for all.
    """
    vocab = logits.shape[1]
    counts = [vocab if n < 0 else min(n, vocab) for n in num_top]
    total = torch.zeros_like(logits[:, :1]) if as_logits else logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, chosen[:, None])
    values, ids = _largest(logits, max(counts)) if max(counts, default=0) else (logits[:, :0], chosen[:, None][:, :0])
    return PendingLogprobs(
        chosen=fetch(chosen),
        own=fetch((own - total)[:, 0]),
        ranks=fetch(_ranks(logits, chosen[:, None])[:, 0]),
        top_values=fetch(values - total),
        top_ids=fetch(ids),
        counts=counts,
    )


def logprobs_of_ids(
    logits: Float[Tensor, "rows vocab"], chosen: Int[Tensor, " rows"], token_ids: list[int], *, as_logits: bool = False
) -> list[TokenLogprobs]:
    """Return for each row the entries of its chosen token and of requested tokens, each with its rank."""
    named = torch.tensor(token_ids, device=logits.device)
    ids = torch.cat([chosen[:, None], named.expand(len(logits), -1)], dim=1)
    values = (logits if as_logits else logits.log_softmax(-1)).gather(1, ids)
    rows = zip(ids.tolist(), values.tolist(), _ranks(logits, ids).tolist(), strict=True)
    return [TokenLogprobs(each, logprobs, ranks[0], ranks) for each, logprobs, ranks in rows]


def prompt_logprobs(logits: Float[Tensor, "rows vocab"], next_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of `next_ids[i]`, the prompt token that follows row i."""
    return token_logprobs(logits, torch.tensor(next_ids, device=logits.device), [num_top] * len(next_ids)).entries()


def _largest(values: Float[Tensor, "rows vocab"], size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest values of each row with their ids, descending, equal values by id.

    If values tie at the cut-off, `topk` chooses any of them; rows with ties are therefore sorted by `_places`. On a GPU
    all rows are sorted, because the host would have to wait to find the ties.
    """
    if size == values.shape[1]:
        ordered, ids = values.sort(dim=-1, descending=True, stable=True)
        return ordered, ids
    if values.device.type != "cpu":
        ids = _places(values).topk(size).indices
        return values.gather(1, ids), ids
    best, ids = values.topk(size + 1)
    tied = (best[:, -1] == best[:, -2]).nonzero()[:, 0]
    ids = ids[:, :-1]
    if len(tied):
        ids[tied] = _places(values[tied]).topk(size).indices
    ids = ids.sort(dim=-1).values
    ordered, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _ranks(logits: Float[Tensor, "rows vocab"], ids: Int[Tensor, "rows ids"]) -> Int[Tensor, "rows ids"]:
    """Return the ranks of tokens; without a kernel, the cost hardly grows with their number."""
    ranks = ranks_natively(logits, ids)
    if ranks is not None:
        return ranks
    places = _places(logits)
    least, order = places.gather(1, ids).sort(dim=1)
    reached = torch.searchsorted(least, places, right=True)  # by each token, of the requested ones
    counts = reached.new_zeros(len(ids), ids.shape[1] + 1).scatter_add_(1, reached, torch.ones_like(reached))
    return torch.empty_like(ids).scatter_(1, order, counts.flip(1).cumsum(1).flip(1)[:, 1:])


def _places(values: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows vocab"]:
    """Return different integers in the order of a row's tokens; the most likely token has the largest."""
    bits = (values + 0.0).view(torch.int32)  # both zeros have the bits of zero
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.long() << 32) - torch.arange(values.shape[-1], device=values.device)
