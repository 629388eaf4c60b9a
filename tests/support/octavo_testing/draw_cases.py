"""Logits and parameters for tests of draws, and the comparison of the kernel with torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from octavo_engine.ops.sampling import DrawParams, make_draw, sample_natively
from octavo_engine.sampling.draws import choose_tokens_reference, draw_keys, gumbel_noise, kept_tokens, seed_keys
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

NEVER = float("-inf")
#: Filters by name; "V" stands for the size of the vocabulary.
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cool": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 20},
    "top-1": {"top_k": 1},
    "top-v": {"top_k": "V", "top_p": 0.5},
    "most": {"top_k": 700, "temperature": 1.7},
    "top-p": {"top_p": 0.95},
    "top-p-hot": {"top_p": 0.9999, "temperature": 1.9},
    "top-p-near-one": {"top_p": 1 - 1e-10},
    "top-p-zero": {"top_p": 0.0},
    "top-k-top-p": {"top_k": 20, "top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


def random_logits(rows: int, vocab: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw_params(
    rows: int,
    vocab: int,
    *,
    temperature: float = 1.0,
    top_k: int | str = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 9,
    keys: npt.NDArray[np.uint64] | None = None,
) -> DrawParams:
    """Return equal parameters for all rows; row i has the seed `seed` + i."""
    seeds = np.arange(seed, seed + rows, dtype=np.uint64)
    number = vocab if isinstance(top_k, str) else top_k
    params = np.repeat(make_draw(temperature=temperature, top_k=number, top_p=top_p, min_p=min_p), rows)
    params["key"] = draw_keys(seed_keys(seeds), np.full(rows, position)) if keys is None else keys
    return params


def native_tokens(logits: Tensor, params: DrawParams) -> Tensor:
    native = sample_natively(logits, params)
    assert native is not None, "these tests need g++"
    return native


def near_ties(
    logits: Tensor, params: DrawParams, kernel: Callable[[Tensor, DrawParams], Tensor] = native_tokens
) -> int:
    """Return how many rows of the kernel differ from torch; assert that their best two sums differ by at most 4 ulp."""
    native = kernel(logits, params)
    rows = (native != choose_tokens_reference(logits, params)).nonzero()[:, 0].numpy()
    if not len(rows):
        return 0
    differing, params = logits[torch.from_numpy(rows)], params[rows]
    assert (params["temperature"] > 0).all()
    scaled = (differing - differing.amax(-1, keepdim=True)) / torch.from_numpy(params["temperature"])[:, None]
    noise = gumbel_noise(params["key"], logits.shape[1], logits.device)
    best = (scaled + noise).masked_fill(~kept_tokens(differing, params), NEVER).topk(2).values
    assert (best[:, 0] - best[:, 1] <= 4 * torch.finfo(torch.float32).eps * noise.abs().amax(-1)).all()
    return len(rows)


def same_kept_tokens(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """Return for how many rows transformers' filters, in our order and in fp64, keep the same tokens."""
    filters = [TemperatureLogitsWarper(temperature)]
    filters += [MinPLogitsWarper(min_p)] if min_p else []
    filters += [TopKLogitsWarper(top_k)] if top_k else []
    filters += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    scores = logits.double()
    for each in filters:
        scores = each(None, scores)
    params = draw_params(*logits.shape, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return int((kept_tokens(logits, params) == scores.isfinite()).all(-1).sum())


def chi_square_excess(tokens: Tensor, logits: Tensor, **fields: Any) -> float:
    """Return by how many standard deviations chi square exceeds its mean; assert that only kept tokens were drawn."""
    kept = kept_tokens(logits, draw_params(1, logits.shape[1], **fields))[0]
    x = logits[0].double() / fields.get("temperature", 1.0)
    expected = x.masked_fill(~kept, NEVER).softmax(-1) * len(tokens)
    counts = torch.bincount(tokens, minlength=len(expected))
    assert counts[~kept].sum() == 0
    likely = expected >= 5  # chi square needs some draws of each outcome: the others count as one
    groups = torch.stack([counts.double(), expected])
    groups = torch.cat([groups[:, likely], groups[:, ~likely].sum(-1, keepdim=True)], dim=1)
    groups = groups[:, groups[1] > 0]
    freedom = groups.shape[1] - 1
    statistic = float(((groups[0] - groups[1]) ** 2 / groups[1]).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5
