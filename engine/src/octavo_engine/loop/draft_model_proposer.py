"""`DraftModelProposer`: decides which sequences get drafts of the draft model, and how many; the runner makes them.

A draft model takes time in each step that drafts, and how often it is right is mostly a property of the two models.
Hence all sequences get drafts or none: while the share of drafts that were accepted lately pays for them. Else a single
sequence gets drafts now and then, unless drafts would not pay if all were accepted.
"""

from collections.abc import Iterator

from octavo_engine.core.sequence import Sequence
from octavo_engine.loop.draft_gain import least_share
from octavo_engine.wire.plan import SeqId, StepCosts

PLACEHOLDER = 0  # a plan holds it for each draft
_FIRST_SHARE = 0.5  # of an engine without a history
_NEWEST, _NEWEST_TRY = 0.1, 0.3  # weight in the share of the newest step, and of the newest try
_MIN_PAUSE, _MAX_PAUSE = 8, 1024  # steps before a try; each try whose own share would not pay doubles the pause


class DraftModelProposer:
    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._share = _FIRST_SHARE
        self._pause, self._num_paused = _MIN_PAUSE, 0
        self._is_try = False  # of the latest drafts
        self._lengths: dict[SeqId, int] = {}  # of the sequences that wait for the result of their drafts

    def propose(self, seqs: list[Sequence], costs: StepCosts) -> Iterator[tuple[SeqId, list[int]]]:
        """Yield placeholders for the drafts of each sequence that gets any. `seqs`: all whose next step decodes."""
        least = least_share(len(seqs), costs)
        self._record(seqs, least)
        for seq in self._drafting(seqs, least):
            count = min(self._num_drafts, seq.limit - 1 - len(seq.token_ids))
            if count > 0:
                self._lengths[seq.seq_id] = len(seq.token_ids)
                yield seq.seq_id, [PLACEHOLDER] * count

    def _record(self, seqs: list[Sequence], least: float) -> None:
        """Update the share by the latest drafts."""
        waiting, self._lengths = self._lengths, {}
        num_right = num_tried = 0
        for seq in seqs:
            grown = len(seq.token_ids) - waiting.get(seq.seq_id, len(seq.token_ids))
            if grown:
                num_right += grown - 1
                num_tried += seq.num_drafts
        if num_tried:
            newest = num_right / num_tried
            self._share += (_NEWEST_TRY if self._is_try else _NEWEST) * (newest - self._share)
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
        self._pause, self._num_paused = min(2 * self._pause, _MAX_PAUSE), 0
        return seqs[:1]
