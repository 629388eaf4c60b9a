"""Proposers of drafts. `NgramProposer` looks for an earlier occurrence of the sequence's last tokens.

Outputs that quote the prompt, such as summaries and edits, repeat long passages of it. A wrong draft changes no output,
because the runner accepts a draft only if the sampler chooses the same token, but it costs time. A sequence therefore
gets drafts only while enough of its recent drafts were accepted to save time; otherwise it gets one draft now and then.

`DraftModelProposer` decides which sequences get drafts of the draft model, and how many; the runner computes them. A
draft model takes time in each step with drafts, and how often its drafts are accepted depends mostly on the two models.
So all sequences get drafts while enough recent drafts were accepted to save time. Otherwise a single sequence gets
drafts now and then, unless drafts would cost time even if all were accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo_engine.core.sequence import Sequence
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.wire.plan import SeqId, StepCosts

Tokens = npt.NDArray[np.int32]
PLACEHOLDER = 0  # token id that a plan has in place of each draft of a draft model
_FIRST_SHARE = 0.5  # share of accepted drafts that is assumed at first
_NEWEST = 0.3  # weight of a sequence's newest drafts in its share
_NEWEST_STEP, _NEWEST_TRY = (
    0.1,
    0.3,
)  # with a draft model: weights of the newest step, and of the newest try, in the share
#: Pauses, in steps, before a single draft or a try of a draft model; a try that loses time doubles the pause.
_MIN_PAUSE, _MAX_PAUSE, _MAX_TRY_PAUSE = 8, 64, 1024


class NgramProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._histories: dict[SeqId, _History] = {}

    def propose(self, seqs: list[Sequence], costs: StepCosts) -> Iterator[tuple[SeqId, list[int]]]:
        """Yield each sequence's drafts, if it has any. `seqs`: all sequences whose next step is a decode step."""
        known = self._histories
        self._histories = {seq.seq_id: known.get(seq.seq_id) or _History() for seq in seqs}
        least = least_share(len(seqs), costs)
        for seq, history in zip(seqs, self._histories.values(), strict=True):
            history.record(seq)
            count = self._config.num_speculative_tokens if history.share >= least else history.count_probe()
            if count and (drafts := find_drafts(history.read(seq.token_ids), self._config)[:count]):
                history.num_before = len(seq.token_ids)
                yield seq.seq_id, drafts


@dataclass(slots=True)
class _History:
    """Acceptance of one sequence's drafts. `share`: accepted part of its drafts, a moving average."""

    share: float = _FIRST_SHARE
    num_before: int = 0  # length when the pending drafts were proposed; 0: none are pending
    pause: int = _MIN_PAUSE
    num_paused: int = 0
    buffer: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    num_read: int = 0  # leading tokens of the sequence that are in the buffer

    def record(self, seq: Sequence) -> None:
        """Update the share once the last drafts have a result: one token, and one more for each accepted draft."""
        grown = len(seq.token_ids) - self.num_before
        if not self.num_before or not grown:
            return
        self.num_before = 0
        if seq.num_drafts:
            self.share += _NEWEST * ((grown - 1) / seq.num_drafts - self.share)
        if grown > 1:
            self.pause = _MIN_PAUSE

    def count_probe(self) -> int:
        """Return how many drafts a sequence gets while drafts cost more time than they save: one after each pause."""
        self.num_paused += 1
        if self.num_paused < self.pause:
            return 0
        self.num_paused, self.pause = 0, min(2 * self.pause, _MAX_PAUSE)
        return 1

    def read(self, token_ids: list[int]) -> Tokens:
        """Return the sequence's tokens in an array; only new tokens are copied."""
        length = len(token_ids)
        if length > len(self.buffer):
            self.buffer, self.num_read = np.empty(2 * length, np.int32), 0
        self.buffer[self.num_read : length] = token_ids[self.num_read :]
        self.num_read = length
        return self.buffer[:length]


def find_drafts(tokens: Tokens, config: SpeculativeConfig) -> list[int]:
    """Return up to `num_speculative_tokens` tokens that follow the longest earlier match of the last tokens.

    Among matches of equal length, the latest one that all wanted tokens follow is used, or else the earliest.
    """
    count, end = config.num_speculative_tokens, len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # ends of matches
    longest = ends[:0]
    for size in range(1, min(config.prompt_lookup_max, end - 1) + 1):
        ends = ends[ends >= size]
        ends = ends[tokens[ends - size] == tokens[end - size]]
        if not len(ends):
            break
        if size >= config.prompt_lookup_min:
            longest = ends
    if not len(longest):
        return []
    followed = longest[longest <= end - count]
    at = followed[-1] if len(followed) else longest[0]
    drafts: list[int] = tokens[at : at + count].tolist()
    return drafts


def least_share(num_seqs: int, costs: StepCosts) -> float:
    """Return the share of accepted drafts above which drafts save time in a step of `num_seqs` decodes; 0: unknown.

    One more draft per sequence costs the time of a token per sequence and, with a draft model, one of its steps. If all
    these drafts were accepted, they would save one step without drafts. If the result is 1 or more, drafts cannot save
    time.
    """
    tokens_s = num_seqs * (costs.prefill_token_s - costs.draft_token_s)
    step_s = costs.step_s - costs.draft_step_s + tokens_s
    draft_s = tokens_s + costs.draft_step_s + num_seqs * costs.draft_token_s
    return draft_s / step_s if step_s > 0 else 0.0


class DraftModelProposer:
    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._share = _FIRST_SHARE
        self._pause, self._num_paused = _MIN_PAUSE, 0
        self._is_try = False  # whether the latest drafts were a try
        self._lengths: dict[SeqId, int] = {}  # by sequence with pending drafts

    def propose(self, seqs: list[Sequence], costs: StepCosts) -> Iterator[tuple[SeqId, list[int]]]:
        """Yield placeholders for the drafts of sequences that get any. `seqs`: all whose next step is a decode step."""
        least = least_share(len(seqs), costs)
        self._record(seqs, least)
        for seq in self._drafting(seqs, least):
            count = min(self._num_drafts, seq.limit - 1 - len(seq.token_ids))
            if count > 0:
                self._lengths[seq.seq_id] = len(seq.token_ids)
                yield seq.seq_id, [PLACEHOLDER] * count

    def _record(self, seqs: list[Sequence], least: float) -> None:
        """Update the share by the results of the latest drafts."""
        waiting, self._lengths = self._lengths, {}
        num_right = num_tried = 0
        for seq in seqs:
            grown = len(seq.token_ids) - waiting.get(seq.seq_id, len(seq.token_ids))
            if grown:
                num_right += grown - 1
                num_tried += seq.num_drafts
        if num_tried:
            newest = num_right / num_tried
            self._share += (_NEWEST_TRY if self._is_try else _NEWEST_STEP) * (newest - self._share)
            if newest >= least:
                self._pause = _MIN_PAUSE

    def _drafting(self, seqs: list[Sequence], least: float) -> list[Sequence]:
        self._is_try = self._share < least
        if not self._is_try:
            self._pause, self._num_paused = _MIN_PAUSE, 0
            return seqs
        self._num_paused += bool(seqs)
        if least >= 1 or self._num_paused < self._pause:
            return []
        self._pause, self._num_paused = min(2 * self._pause, _MAX_TRY_PAUSE), 0
        return seqs[:1]
