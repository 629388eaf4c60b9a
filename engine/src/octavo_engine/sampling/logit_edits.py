"""Changes logits before sampling: penalties, allowed ids, bad words, min_tokens, logit bias, limit on reasoning.

Repetition, frequency and presence penalties cover the tokens of a sequence. A sequence with a penalty keeps its
distinct token ids and their counts, updated with each token. Only the logits of these ids are changed, by one gather
and one scatter for all rows. Drafts are counted in a copy, for the rows that follow them, because they may be rejected.
Sequences whose requests need none of the other changes have no `TokenMasks`, so that their rows cost nothing.

If a step starts before the host knows the newest tokens, all token counts are kept on the device instead.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.devices.transfers import Copy, keep
from octavo_engine.ops.triton_devices import runs_triton
from octavo_engine.wire.sampling import SamplingParams

Ints = npt.NDArray[np.int64]
_NEVER = float("-inf")
_UNKNOWN, _NO_TOKEN = -1, -2  # stand for the token that an entry counts
_MOST_COUNTED = 32767


@dataclass(frozen=True, slots=True)
class Penalty:
    """Penalties for one row of logits: distinct token ids, and their counts in the output (0: only in the prompt)."""

    params: SamplingParams
    token_ids: Ints
    counts: Ints


class TokenCounts:
    """The distinct tokens of the prompt and the output, with their counts in the output.

    `num_on_device`: how many tokens of the sequence `PenaltyCounts` has counted.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.num_on_device = 0
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
        return Penalty(self.params, ids, np.array(counts, dtype=np.int64))

    def _update(self, token_ids: npt.NDArray[np.int32], length: int) -> None:
        """Count `token_ids[:length]`; after a rollback, when the length has shrunk, count from the start."""
        if length < self._num_seen:
            self._num_seen, self._index, self._counts = 0, {}, []
        for position in range(self._num_seen, length):
            at = self._index.setdefault(int(token_ids[position]), len(self._counts))
            if at == len(self._counts):
                self._counts.append(0)
            self._counts[at] += position >= self.num_prompt_tokens
        self._num_seen = length


def apply_penalties(
    logits: Float[Tensor, "rows vocab"], rows: list[int], penalties: list[Penalty], copy: Copy = keep
) -> None:
    """Apply `penalties[i]` to row `rows[i]` in place: repetition, then frequency and presence (output tokens only)."""
    sizes = [len(p.token_ids) for p in penalties]
    vocab = logits.shape[1]
    flat = np.concatenate([p.token_ids + row * vocab for row, p in zip(rows, penalties, strict=True)])
    in_output = np.concatenate([p.counts for p in penalties])

    def column(values: list[float]) -> Tensor:
        return copy(torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)))

    repetition = column([p.params.repetition_penalty for p in penalties])
    frequency = column([p.params.frequency_penalty for p in penalties])
    presence = column([p.params.presence_penalty for p in penalties])
    where = copy(torch.from_numpy(flat))
    count = copy(torch.from_numpy(in_output))
    logits.view(-1)[where] = _penalised(logits.view(-1)[where], count, repetition, frequency, presence)


def _penalised(x: Tensor, count: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    x = torch.where(x > 0, x / repetition, x * repetition)
    x -= frequency * count + presence * (count > 0)
    return x


class PenaltyCounts:
    """Token counts of all slots on the device, for steps that start before the host knows the newest tokens.

    The counts are [slots, vocab] int16, allocated at first use: 0: the sequence does not have the token; -1: the token
    is only in its prompt; other values: number in the output, up to 32767. `newest`: the newest token of each slot.
    """

    def __init__(self, newest: Int[Tensor, " slots"], vocab_size: int, copy: Copy) -> None:
        self._newest, self._vocab_size, self._copy = newest, vocab_size, copy
        self._counts: Tensor | None = None

    def release(self) -> None:
        """Free all counts. All sequences must have ended; later sequences are counted from the start."""
        self._counts = None

    def entry(self, row: int, slot: int, seq: TokenCounts, token_ids: npt.NDArray[np.int32], length: int) -> Ints:
        """Return the numbers that penalise a row after `token_ids[:length]`, whose last token may be unknown.

        The numbers are the row, the slot, a token to count first, and the penalties, as bits of fp32.
        """
        token = _NO_TOKEN
        if 0 < seq.num_on_device == length - 1:
            token = int(token_ids[length - 1])
        elif length != seq.num_on_device:
            is_unknown = token_ids[length - 1] < 0
            self._count(slot, token_ids[: length - is_unknown], seq.num_prompt_tokens)
            token = _UNKNOWN if is_unknown else _NO_TOKEN
        seq.num_on_device = length
        params = seq.params
        penalties = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        return np.concatenate(([row, slot, token], np.array(penalties, dtype=np.float32).view(np.int32)))

    def _count(self, slot: int, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Count the tokens of a sequence from the start."""
        ids, numbers = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        in_prompt = np.setdiff1d(token_ids[:num_prompt_tokens], ids)
        values = np.concatenate((np.minimum(numbers, _MOST_COUNTED), np.full(len(in_prompt), -1))).astype(np.int16)
        where = np.concatenate((ids, in_prompt)).astype(np.int64)
        row = self._table()[slot].zero_()
        row.index_copy_(0, self._copy(torch.from_numpy(where)), self._copy(torch.from_numpy(values)))

    def apply(self, logits: Float[Tensor, "rows vocab"], entries: list[Ints]) -> None:
        """Count a token of each row, and apply its penalties in place."""
        params = torch.from_numpy(np.stack(entries).astype(np.int32))
        if runs_triton(logits):
            from octavo_engine.ops.triton import elementwise  # Triton is missing on most machines without a GPU

            elementwise.penalise(logits, self._table(), self._copy(params), self._newest)
            return
        for (row, slot, token, *_), penalties in zip(params.tolist(), params[:, 3:].view(torch.float32), strict=True):
            counts = self._table()[slot]
            if token != _NO_TOKEN:
                counted = int(self._newest[slot]) if token == _UNKNOWN else token
                counts[counted] = min(max(int(counts[counted]), 0) + 1, _MOST_COUNTED)
            ids = counts.nonzero()[:, 0]
            logits[row, ids] = _penalised(logits[row, ids], counts[ids].clamp(min=0), *penalties)

    def _table(self) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros(
                len(self._newest), self._vocab_size, dtype=torch.int16, device=self._newest.device
            )
        return self._counts


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most reasoning tokens of an output. `start_id`: the token that begins reasoning; None: reasoning begins with
    the output."""

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
    """`bad_words`: length of a word's prefix (all tokens but the last) -> prefix (int32 bytes) -> last tokens.

    A last token is banned if the output ends with the word's prefix, so a step costs one lookup per length. The tensors
    are on the device, and no change waits for the device.
    """

    allowed: Tensor | None
    bad_words: dict[int, dict[bytes, Tensor]]
    stop_ids: Tensor | None  # banned until `min_tokens` have been generated
    min_tokens: int
    bias_ids: Tensor | None
    bias: Tensor | None
    thinking: ThinkingBudget | None

    @staticmethod
    def from_params(
        params: SamplingParams, eos_token_id: int | None, *, vocab_size: int, copy: Copy = keep
    ) -> "TokenMasks | None":
        """Build the masks; return None if the request needs none. Ids outside the vocabulary are ignored."""

        def ids(values: list[int]) -> Tensor:
            known = sorted({v for v in values if 0 <= v < vocab_size})
            return copy(torch.tensor(known, dtype=torch.int64))

        words = [word for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size]
        bad_words = _by_length(words, copy) if words else {}
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
            bias_ids=copy(torch.tensor(list(bias), dtype=torch.int64)) if bias else None,
            bias=copy(torch.tensor(list(bias.values()))) if bias else None,
            thinking=thinking,
        )

    def apply(self, row: Float[Tensor, " vocab"], output: npt.NDArray[np.int32]) -> None:
        """Apply the masks in place, in vLLM's order. `output`: the tokens generated so far."""
        if self.allowed is not None:
            kept = row.index_select(0, self.allowed)
            row.fill_(_NEVER)
            row.index_copy_(0, self.allowed, kept)
        for length, words in self.bad_words.items():
            banned = words.get(output[len(output) - length :].tobytes()) if length <= len(output) else None
            if banned is not None:
                row.index_fill_(0, banned, _NEVER)
        if self.stop_ids is not None and len(output) < self.min_tokens:
            row.index_fill_(0, self.stop_ids, _NEVER)
        if self.bias_ids is not None and self.bias is not None:
            row.index_add_(0, self.bias_ids, self.bias)
        if self.thinking is not None and self.thinking.is_spent(output):
            row.fill_(_NEVER)
            row[self.thinking.end_id].fill_(0.0)


def _after_last(output: npt.NDArray[np.int32], token_id: int) -> int | None:
    """Return the position after the last `token_id`; None if there is none."""
    places = np.flatnonzero(output == token_id)
    return int(places[-1]) + 1 if len(places) else None


def _by_length(bad_words: list[list[int]], copy: Copy) -> dict[int, dict[bytes, Tensor]]:
    last_tokens: dict[tuple[int, ...], list[int]] = {}
    for *before, last in bad_words:
        last_tokens.setdefault(tuple(before), []).append(last)
    parts = copy(torch.tensor([*chain(*last_tokens.values())])).split_with_sizes([*map(len, last_tokens.values())])
    by_length: dict[int, dict[bytes, Tensor]] = {}
    for prefix, part in zip(last_tokens, parts, strict=True):
        by_length.setdefault(len(prefix), {})[np.array(prefix, dtype=np.int32).tobytes()] = part
    return by_length
