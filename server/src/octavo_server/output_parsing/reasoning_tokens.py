"""Counts the reasoning tokens of an answer: the tokens between the two markers, if each marker is one token.

If the markers are not single tokens, all tokens of each chunk that starts within reasoning are counted: a few too many.
"""

from collections.abc import Sequence


class ReasoningTokens:
    def __init__(self, *, start_id: int | None, end_id: int | None, is_open: bool) -> None:
        self.num_tokens = 0
        self._start_id = start_id
        self._end_id = end_id
        self._is_open = is_open
        self._has_ended = False

    def add(self, token_ids: Sequence[int], *, began_as_reasoning: bool) -> None:
        if self._end_id is None:
            self.num_tokens += len(token_ids) if began_as_reasoning else 0
            return
        for token_id in token_ids:
            if token_id == self._end_id:
                self._has_ended = True
            elif token_id == self._start_id:
                self._is_open = True
            elif self._is_open and not self._has_ended:
                self.num_tokens += 1
