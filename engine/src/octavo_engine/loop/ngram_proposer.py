"""`NgramProposer`: guesses the next tokens of a sequence from an earlier place in it that ends with the same tokens.

Text that quotes its prompt, as summaries and edits do, repeats long runs of it. A wrong guess changes no output, as the
runner accepts a draft only where the sampler chooses the same token, but it costs time. Hence a sequence gets drafts
only while the share of its drafts that were accepted lately pays for them; else it gets a single one now and then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo_engine.core.sequence import Sequence
from octavo_engine.loop.draft_gain import least_share
from octavo_engine.settings.config import SpeculativeConfig
from octavo_engine.wire.plan import SeqId, StepCosts

Tokens = npt.NDArray[np.int32]
_FIRST_SHARE = 0.5  # of a sequence without a history
_NEWEST = 0.3  # weight of the newest drafts in the share
_MIN_PAUSE, _MAX_PAUSE = 8, 64  # steps before a single draft; each single draft that is rejected doubles the pause


class NgramProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._histories: dict[SeqId, _History] = {}

    def propose(self, seqs: list[Sequence], costs: StepCosts) -> Iterator[tuple[SeqId, list[int]]]:
        """Yield the drafts of those sequences that have any. `seqs`: all sequences whose next step decodes."""
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
    """Acceptance of the last drafts of one sequence. `share`: of accepted drafts, a moving average."""

    share: float = _FIRST_SHARE
    num_before: int = 0  # tokens when the drafts were proposed that wait for their result; 0: none wait
    pause: int = _MIN_PAUSE
    num_paused: int = 0
    buffer: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    num_read: int = 0  # leading tokens of the sequence that are in the buffer

    def record(self, seq: Sequence) -> None:
        """Update the share if the last drafts have their result: one token, and one more for each accepted draft."""
        grown = len(seq.token_ids) - self.num_before
        if not self.num_before or not grown:
            return
        self.num_before = 0
        if seq.num_drafts:
            self.share += _NEWEST * ((grown - 1) / seq.num_drafts - self.share)
        if grown > 1:
            self.pause = _MIN_PAUSE

    def count_probe(self) -> int:
        """Return how many drafts a sequence gets although they do not pay: one after each pause."""
        self.num_paused += 1
        if self.num_paused < self.pause:
            return 0
        self.num_paused, self.pause = 0, min(2 * self.pause, _MAX_PAUSE)
        return 1

    def read(self, token_ids: list[int]) -> Tokens:
        """Return the sequence's tokens as an array, to which only the new ones are copied."""
        length = len(token_ids)
        if length > len(self.buffer):
            self.buffer, self.num_read = np.empty(2 * length, np.int32), 0
        self.buffer[self.num_read : length] = token_ids[self.num_read :]
        self.num_read = length
        return self.buffer[:length]


def find_drafts(tokens: Tokens, config: SpeculativeConfig) -> list[int]:
    """Return up to `num_speculative_tokens` tokens that follow the longest earlier match of the last tokens.

    Of equal matches the latest one wins that all tokens follow; if there is none, the earliest, which most follow.
    """
    count, end = config.num_speculative_tokens, len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # of the matches
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
