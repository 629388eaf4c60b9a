"""Repetition, frequency and presence penalties over the tokens of a sequence.

A sequence with a penalty keeps the distinct ids of its tokens with their counts, updated with each token; only the
logits of these ids are changed, for all such rows in one gather and one scatter.
"""

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.wire.sampling import SamplingParams

Ints = npt.NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of the prompt and the output, with their counts in the output."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self.params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0
        self._index: dict[int, int] = {}
        self._counts: list[int] = []

    def update(self, token_ids: npt.NDArray[np.int32], length: int) -> None:
        """Count `token_ids[:length]`; after a rollback, when the length has shrunk, count from the start."""
        if length < self._num_seen:
            self._num_seen, self._index, self._counts = 0, {}, []
        for position in range(self._num_seen, length):
            at = self._index.setdefault(int(token_ids[position]), len(self._counts))
            if at == len(self._counts):
                self._counts.append(0)
            self._counts[at] += position >= self._num_prompt_tokens
        self._num_seen = length

    def arrays(self) -> tuple[Ints, Ints]:
        """Return the distinct token ids, and their counts in the output (0: the token is only in the prompt)."""
        ids = np.fromiter(self._index, dtype=np.int64, count=len(self._index))
        return ids, np.array(self._counts, dtype=np.int64)


def apply_penalties(logits: Float[Tensor, "rows vocab"], rows: list[int], counts: list[TokenCounts]) -> None:
    """Apply `counts[i]` to row `rows[i]` in place: repetition, then frequency and presence (output tokens only)."""
    arrays = [c.arrays() for c in counts]
    sizes = [len(ids) for ids, _ in arrays]
    vocab = logits.shape[1]
    flat = np.concatenate([ids + row * vocab for row, (ids, _) in zip(rows, arrays, strict=True)])
    in_output = np.concatenate([c for _, c in arrays])

    def column(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(logits.device)

    repetition = column([c.params.repetition_penalty for c in counts])
    frequency = column([c.params.frequency_penalty for c in counts])
    presence = column([c.params.presence_penalty for c in counts])
    where = torch.from_numpy(flat).to(logits.device)
    count = torch.from_numpy(in_output).to(logits.device)
    touched = logits.view(-1)[where]
    touched = torch.where(touched > 0, touched / repetition, touched * repetition)
    touched -= frequency * count + presence * (count > 0)
    logits.view(-1)[where] = touched
