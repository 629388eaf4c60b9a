"""`GrammarState`: the position of one sequence in its grammar, and the tokens that may come next.

The state follows the sequence's output and consumes new tokens, so a preempted or forked sequence needs only its tokens
to continue. This module, not llguidance, allows stop ids: where the grammar may end; but before `min_tokens`, or with
`ignore_eos`, only where the grammar also allows no other token.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from octavo_engine.grammar.compiler import CompiledGrammar

Words = npt.NDArray[np.int32]  # one bit per token id, lowest first
MAX_THREADS = 16


class GrammarState:
    def __init__(
        self, compiled: CompiledGrammar, *, stop_ids: Iterable[int], min_tokens: int = 0, ignore_eos: bool = False
    ) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher()
        self._tokens: list[int] = []
        self._min_tokens = min_tokens
        self._ignore_eos = ignore_eos
        self._stop_ids = sorted({i for i in stop_ids if 0 <= i < compiled.vocab_size})

    @property
    def num_words(self) -> int:
        return -(-self._compiled.vocab_size // 32)

    def fill(self, rows: Words, output: npt.NDArray[np.int32], drafts: Sequence[int] = ()) -> str | None:
        """Write to row i the mask of the tokens that may follow `output` and the first i draft tokens.

        Rows after a draft that the grammar rejects are zero. The drafts are rolled back. Return an error
        message if no token can follow the output, else None.
        """
        accepted = 0
        for row in range(1 + len(drafts)):
            matcher = self.follow(output) if row == 0 else self._matcher
            if matcher is not None:
                matcher.unsafe_compute_mask_ptr(rows[row].ctypes.data, rows[row].nbytes)
            error = self.finish(rows[row], len(output) + row)
            if error is not None and row == 0:
                return error
            if error is not None:  # the drafts caused it, which may be no part of the output
                rows[row:] = 0
                self._restart()
                return None
            if row == len(drafts):
                break
            if self._matcher.try_consume_tokens([drafts[row]]) != 1:
                rows[row + 1 :] = 0
                break
            accepted += 1
        if accepted:
            self._matcher.rollback(accepted)
        return None

    def num_allowed(self, output: npt.NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Return how many of the first draft tokens may follow `output`, without any that ends it."""
        if self.follow(output) is None or self._matcher.is_error():
            return 0
        eos = self._compiled.eos_token_id
        return self._matcher.validate_tokens([*takewhile(lambda i: i != eos and not self.is_end(i), drafts)])

    def follow(self, output: npt.NDArray[np.int32]) -> LLMatcher | None:
        """Return the matcher, positioned after `output`; None if the grammar rejects the output."""
        return self._matcher if self._follow(output) else None

    def finish(self, row: Words, num_output: int) -> str | None:
        """Add the stop ids to the mask that llguidance computed; return an error message if no token can follow."""
        if self._matcher.is_error():
            return self._failure()
        set_bit(row, self._compiled.eos_token_id, on=False)
        may_stop = self._matcher.is_accepting()
        if may_stop and (self._ignore_eos or num_output < self._min_tokens):
            may_stop = not row.any()
        if may_stop:
            for stop_id in self._stop_ids:
                set_bit(row, stop_id, on=True)
        return None

    def is_end(self, token_id: int) -> bool:
        return token_id in self._stop_ids

    def fill_any(self, row: Words) -> None:
        """Allow all tokens except the stop ids."""
        row[:] = -1
        for stop_id in self._stop_ids:
            set_bit(row, stop_id, on=False)

    def _follow(self, output: npt.NDArray[np.int32]) -> bool:
        """Move the matcher to the end of `output`, by a rollback if it is shorter; return False on a rejected token."""
        seen = len(self._tokens)
        if seen > len(output) or (seen and self._tokens[-1] != output[seen - 1]):
            seen = self._rewind(output)
        new: list[int] = output[seen:].tolist()
        self._tokens += new
        return not new or self._matcher.consume_tokens(new)

    def _rewind(self, output: npt.NDArray[np.int32]) -> int:
        """Roll back to the longest common prefix of the consumed tokens and `output`; return its length."""
        pairs = zip(self._tokens, output.tolist(), strict=False)
        same = next(
            (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(self._tokens), len(output))
        )
        self._matcher.rollback(len(self._tokens) - same)
        del self._tokens[same:]
        return same

    def _restart(self) -> None:
        """Replace a matcher that has failed, which can't be rolled back; the next call consumes the output again."""
        self._matcher, self._tokens = self._compiled.matcher(), []

    def _failure(self) -> str:
        """Return a message with llguidance's error; "NoExtension" means that no text can complete the grammar."""
        detail = self._matcher.get_error().partition("\n")[0].strip()
        return f"The output cannot follow its grammar any further ({detail or self._matcher.stop_reason()})."


def set_bit(row: Words, token_id: int, *, on: bool) -> None:
    word, bit = divmod(token_id, 32)
    flag = np.uint32(1 << bit)
    unsigned = row.view(np.uint32)
    unsigned[word] = unsigned[word] | flag if on else unsigned[word] & ~flag


class MaskWorker:
    """A pool of at most half as many threads as CPUs, and at most 16: the other CPUs serve other work."""

    def __init__(self) -> None:
        self._executor = LLExecutor(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def fill(self, work: list[tuple[LLMatcher, int]], words: Words) -> None:
        """Write masks to `words` (contiguous). `work`: matchers and their rows. A matcher records its own failure."""
        self._executor.unsafe_compute_mask_ptr(work, words.ctypes.data, words.shape[1] * words.itemsize, len(words))
