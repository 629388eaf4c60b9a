"""`PostReasoningState`: a grammar that applies only after the model's reasoning, which is unconstrained.

An end token closes reasoning. If reasoning is not open from the first token on, the first token may be a start token
that opens it; without the start token the grammar applies at once. No stop token is allowed within reasoning, since the
requested output would be missing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from octavo_engine.grammar.state import GrammarState, Words, set_bit


class PostReasoningState:
    """`start_id`: the token that opens reasoning; None if reasoning is open from the first token on."""

    def __init__(self, state: GrammarState, *, start_id: int | None, end_id: int) -> None:
        self._state = state
        self._start_id = start_id
        self._end_id = end_id
        self._num_before: int | None = None  # the result of `_begin` for the output that was followed last

    def fill(self, rows: Words, output: npt.NDArray[np.int32], drafts: Sequence[int] = ()) -> str | None:
        """Fill the masks like `GrammarState.fill`; reasoning allows all tokens but stop tokens.

        Rows after a draft that ends the reasoning are zero.
        """
        begin = self._begin(output)
        if begin is None:
            num_free = 1 + self.num_allowed(output, drafts)
            rows[num_free:] = 0
            for row in rows[:num_free]:
                self._state.fill_any(row)
            return None
        error = self._state.fill(rows, output[begin:], drafts)
        if len(output) == 0 and self._start_id is not None:
            set_bit(rows[0], self._start_id, on=True)
        return error

    def num_allowed(self, output: npt.NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Count drafts like `GrammarState.num_allowed`; drafts within reasoning stop before its end token."""
        begin = self._begin(output)
        if begin is not None:
            return self._state.num_allowed(output[begin:], drafts)
        ends = (i for i, draft in enumerate(drafts) if draft == self._end_id or self.is_end(draft))
        return next(ends, len(drafts))

    def follow(self, output: npt.NDArray[np.int32]) -> LLMatcher | None:
        """Return the matcher like `GrammarState.follow`; None also during reasoning."""
        self._num_before = self._begin(output)
        return None if self._num_before is None else self._state.follow(output[self._num_before :])

    def finish(self, row: Words, num_output: int) -> str | None:
        """Complete a mask like `GrammarState.finish`, for the output of the last `follow`."""
        if self._num_before is None:
            self._state.fill_any(row)
            return None
        error = self._state.finish(row, num_output - self._num_before)
        if num_output == 0 and self._start_id is not None:
            set_bit(row, self._start_id, on=True)
        return error

    def is_end(self, token_id: int) -> bool:
        return self._state.is_end(token_id)

    def _begin(self, output: npt.NDArray[np.int32]) -> int | None:
        """Return how many tokens of the output are reasoning, before the grammar applies; None until reasoning ends."""
        if self._start_id is not None and (len(output) == 0 or output[0] != self._start_id):
            return 0
        ends = np.flatnonzero(output == self._end_id)
        return int(ends[0]) + 1 if len(ends) else None
