"""`TokenMasks`: a request's allowed ids, bad words, min_tokens, logit bias and limit on reasoning.

A sequence whose request has none of these has no `TokenMasks`, so its row of logits costs nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.wire.sampling import SamplingParams

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The largest number of reasoning tokens. `start_id`: None if reasoning is open from the first token on."""

    num_tokens: int
    start_id: int | None
    end_id: int

    def is_spent(self, output: npt.NDArray[np.int32]) -> bool:
        """Return True if reasoning is open and has all its tokens."""
        begin = 0 if self.start_id is None else _after_last(output, self.start_id)
        if begin is None or (_after_last(output, self.end_id) or 0) > begin:
            return False
        return len(output) - begin >= self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """`bad_words`: number of tokens before the last one of a word -> these tokens, as bytes of int32 -> last tokens.

    A last token is banned if the output ends with the tokens before it, so a step costs a look-up for each length.
    """

    allowed: Tensor | None
    bad_words: dict[int, dict[bytes, list[int]]]
    stop_ids: Tensor | None  # banned until `min_tokens` have been generated
    min_tokens: int
    bias_ids: Tensor | None
    bias: Tensor | None
    thinking: ThinkingBudget | None

    @staticmethod
    def from_params(
        params: SamplingParams, eos_token_id: int | None, *, vocab_size: int, device: torch.device
    ) -> "TokenMasks | None":
        """Build the masks; return None if the request uses none. Ids outside the vocabulary are dropped."""

        def ids(values: list[int]) -> Tensor:
            known = sorted({v for v in values if 0 <= v < vocab_size})
            return torch.tensor(known, dtype=torch.int64, device=device)

        bad_words = _by_length([word for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size])
        bias = {t: b for t, b in (params.logit_bias or {}).items() if 0 <= t < vocab_size}
        budget, end_id = params.thinking_token_budget, params.reasoning_end_token_id
        thinking = None
        if budget is not None and end_id is not None and 0 <= end_id < vocab_size:
            thinking = ThinkingBudget(budget, params.reasoning_start_token_id, end_id)
        if params.allowed_token_ids is None and not (bad_words or params.min_tokens or bias or thinking):
            return None
        stop_ids = [*(params.stop_token_ids or []), *([] if eos_token_id is None else [eos_token_id])]
        return TokenMasks(
            allowed=None if params.allowed_token_ids is None else ids(params.allowed_token_ids),
            bad_words=bad_words,
            stop_ids=ids(stop_ids) if params.min_tokens else None,
            min_tokens=params.min_tokens,
            bias_ids=torch.tensor(list(bias), dtype=torch.int64, device=device) if bias else None,
            bias=torch.tensor(list(bias.values()), device=device) if bias else None,
            thinking=thinking,
        )

    def apply(self, row: Float[Tensor, " vocab"], output: npt.NDArray[np.int32]) -> None:
        """Apply the masks in place, in vLLM's order. `output`: the tokens generated so far."""
        if self.allowed is not None:
            kept = row[self.allowed]
            row.fill_(_NEVER)
            row[self.allowed] = kept
        for length, words in self.bad_words.items():
            if length <= len(output) and (banned := words.get(output[len(output) - length :].tobytes())):
                row[banned] = _NEVER
        if self.stop_ids is not None and len(output) < self.min_tokens:
            row[self.stop_ids] = _NEVER
        if self.bias_ids is not None and self.bias is not None:
            row[self.bias_ids] += self.bias
        if self.thinking is not None and self.thinking.is_spent(output):
            row.fill_(_NEVER)
            row[self.thinking.end_id] = 0.0


def _after_last(output: npt.NDArray[np.int32], token_id: int) -> int | None:
    """Return the position after the last such token; None if there is none."""
    places = np.flatnonzero(output == token_id)
    return int(places[-1]) + 1 if len(places) else None


def _by_length(bad_words: list[list[int]]) -> dict[int, dict[bytes, list[int]]]:
    by_length: dict[int, dict[bytes, list[int]]] = {}
    for *before, last in bad_words:
        by_length.setdefault(len(before), {}).setdefault(np.array(before, dtype=np.int32).tobytes(), []).append(last)
    return by_length
