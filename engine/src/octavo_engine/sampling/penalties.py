"""Repetition, frequency and presence penalties over the tokens of a sequence.

A sequence with a penalty keeps the distinct ids of its tokens with their counts, updated with each token; only the
logits of these ids are changed, for all such rows in one gather and one scatter. Drafts are counted in a copy for the
rows that follow them, as they may be rejected.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.wire.sampling import SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Penalty:
    """The penalties of one row of logits: distinct token ids, and their counts in the output (0: prompt only)."""

    params: SamplingParams
    token_ids: Ints
    counts: Ints


class TokenCounts:
    """The distinct tokens of the prompt and the output, with their counts in the output."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0
        self._index: dict[int, int] = {}
        self._counts: list[int] = []

    def penalty(self, token_ids: npt.NDArray[np.int32], length: int, num_drafts: int) -> Penalty:
        """Return the penalty of the row after `token_ids[:length]`, of which the last `num_drafts` are drafts."""
        self._update(token_ids, length - num_drafts)
        index, counts = self._index, self._counts
        if num_drafts:
            index, counts = dict(index), list(counts)
            for token_id in token_ids[length - num_drafts : length].tolist():
                if index.setdefault(token_id, len(counts)) == len(counts):
                    counts.append(0)
                counts[index[token_id]] += 1
        ids = np.fromiter(index, dtype=np.int64, count=len(index))
        return Penalty(self._params, ids, np.array(counts, dtype=np.int64))

    def _update(self, token_ids: npt.NDArray[np.int32], length: int) -> None:
        """Count `token_ids[:length]`; after a rollback, when the length has shrunk, count from the start."""
        if length < self._num_seen:
            self._num_seen, self._index, self._counts = 0, {}, []
        for position in range(self._num_seen, length):
            at = self._index.setdefault(int(token_ids[position]), len(self._counts))
            if at == len(self._counts):
                self._counts.append(0)
            self._counts[at] += position >= self._num_prompt_tokens
        self._num_seen = length


def apply_penalties(logits: Float[Tensor, "rows vocab"], rows: list[int], penalties: list[Penalty]) -> None:
    """Apply `penalties[i]` to row `rows[i]` in place: repetition, then frequency and presence (output tokens only)."""
    sizes = [len(p.token_ids) for p in penalties]
    vocab = logits.shape[1]
    flat = np.concatenate([p.token_ids + row * vocab for row, p in zip(rows, penalties, strict=True)])
    in_output = np.concatenate([p.counts for p in penalties])

    def column(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(logits.device)

    repetition = column([p.params.repetition_penalty for p in penalties])
    frequency = column([p.params.frequency_penalty for p in penalties])
    presence = column([p.params.presence_penalty for p in penalties])
    where = torch.from_numpy(flat).to(logits.device)
    count = torch.from_numpy(in_output).to(logits.device)
    touched = logits.view(-1)[where]
    touched = torch.where(touched > 0, touched / repetition, touched * repetition)
    touched -= frequency * count + presence * (count > 0)
    logits.view(-1)[where] = touched
