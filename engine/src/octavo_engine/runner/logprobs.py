"""Log-probabilities of the chosen and the most likely tokens, or their logits, from logits of any processing stage."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.wire.records import TokenLogprobs


def token_logprobs(
    logits: Float[Tensor, "rows vocab"], chosen: Int[Tensor, " rows"], num_top: list[int], *, as_logits: bool = False
) -> list[TokenLogprobs]:
    """Return log-probabilities per row, or logits with `as_logits`.

    `num_top[i]`: likely tokens to report beside the chosen token; -1 for all.
    """
    vocab = logits.shape[1]
    counts = [vocab if n < 0 else min(n, vocab) for n in num_top]
    total = torch.zeros_like(logits[:, :1]) if as_logits else logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, chosen[:, None])
    ranks = (logits >= own).sum(-1).tolist()  # last among equal logits, so that a token outside the top k ranks after k
    own = own - total
    values, ids = _largest(logits, max(counts)) if max(counts, default=0) else (logits[:, :0], chosen[:, None][:, :0])
    values = values - total
    top_values, top_ids = values.tolist(), ids.tolist()
    return [
        TokenLogprobs([token, *top_ids[i][:n]], [value, *top_values[i][:n]], ranks[i])
        for i, (token, value, n) in enumerate(zip(chosen.tolist(), own[:, 0].tolist(), counts, strict=True))
    ]


def logprobs_of_ids(
    logits: Float[Tensor, " vocab"], chosen: int, token_ids: list[int], *, as_logits: bool = False
) -> TokenLogprobs:
    """Return the entries of a chosen token and of requested tokens, each with its rank."""
    ids = [chosen, *token_ids]
    values = logits[ids]
    ranks: list[int] = (logits >= values[:, None]).sum(-1).tolist()
    found: list[float] = (values if as_logits else values - logits.logsumexp(-1)).tolist()
    return TokenLogprobs(ids, found, ranks[0], ranks)


def prompt_logprobs(logits: Float[Tensor, "rows vocab"], next_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of `next_ids[i]`, the prompt token that follows row i."""
    return token_logprobs(logits, torch.tensor(next_ids, device=logits.device), [num_top] * len(next_ids))


def _largest(values: Float[Tensor, "rows vocab"], size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest values of each row with their ids, descending, equal values by id.

    If values tie at the cut-off, it is undefined which of them are included.
    """
    if size == values.shape[1]:
        ordered, ids = values.sort(dim=-1, descending=True, stable=True)
        return ordered, ids
    ids = values.topk(size, sorted=False).indices.sort(dim=-1).values
    ordered, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)
