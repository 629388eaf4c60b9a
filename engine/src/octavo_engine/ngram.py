"""`NgramProposer`: guesses the next tokens of a sequence from an earlier place in it that ends with the same tokens.

Text that quotes its prompt, as summaries and edits do, repeats long runs of it. A wrong guess costs some rows of a step
and changes no output: the runner accepts a draft only where the sampler chooses the same token.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo_engine.config import SpeculativeConfig
from octavo_engine.core.sequence import Sequence
from octavo_engine.wire.plan import SeqId

Tokens = npt.NDArray[np.int32]


class NgramProposer:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._buffers: dict[SeqId, Tokens] = {}  # the tokens searched in the last call, with room for more
        self._lengths: dict[SeqId, int] = {}

    def propose(self, seqs: list[Sequence]) -> Iterator[tuple[SeqId, list[int]]]:
        """Yield the drafts of those sequences that have any. `seqs`: all sequences whose next step decodes.

        Sequences with a grammar or penalties get none: their masks and counts are those of one row, not yet of several.
        """
        buffers, lengths = self._buffers, self._lengths
        self._buffers, self._lengths = {}, {}
        for seq in seqs:
            if seq.group.request.grammar is None and not seq.params.has_penalties:
                tokens = self._read(seq, buffers.get(seq.seq_id), lengths.get(seq.seq_id, 0))
                if drafts := find_drafts(tokens, self._config):
                    yield seq.seq_id, drafts

    def _read(self, seq: Sequence, buffer: Tokens | None, filled: int) -> Tokens:
        """Return the sequence's tokens as an array, to which only the new ones are copied."""
        length = len(seq.token_ids)
        if buffer is None or length > len(buffer):
            buffer, filled = np.empty(2 * length, np.int32), 0
        buffer[filled:length] = seq.token_ids[filled:]
        self._buffers[seq.seq_id], self._lengths[seq.seq_id] = buffer, length
        return buffer[:length]


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
    found: list[int] = tokens[at : at + count].tolist()
    return found
