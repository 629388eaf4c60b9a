"""The costs of a step and of moving a block, measured while serving; inputs of the scheduler's decisions.

A step is modelled as `step_s + tokens * prefill_token_s + pairs * context_token_s`, where `pairs` counts, for each
token, the tokens before it in its sequence. The three costs are the least-squares fit of the relative error over
recent steps. Steps with and without a prompt are weighed separately, so that decoding for long does not erase what a
prompt costs.
"""

import numpy as np
import numpy.typing as npt

from octavo_engine.wire.plan import StepCosts

_FIRST_CHUNK_TOKENS = 16  # a chunk of at least this size must be measured before costs are reported
_MEMORY = 0.98  # weight of a step relative to the next one of its kind: about 50 steps count
_SCALE = np.array([1.0, 1 / 16, 1 / 65536])  # of steps, tokens, pairs: a single sample is mostly a cost of its tokens
_RIDGE = 1e-9  # relative to the matrix; decides between solutions that fit equally well
_MIN_TOKEN_S = 1e-9
_NEWEST_WEIGHT = 0.2  # of swaps and log-probabilities

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class CostMeter:
    """Moving averages of the costs; 0 means that a cost is not measured yet."""

    def __init__(self) -> None:
        # Normal equations of steps without and with a prompt: the matrix, and in the last column the right side.
        self._equations = np.zeros((2, 3, 4))
        self._is_measured = False
        self._swap_block_s = self._logprob_row_s = 0.0

    def record_forward(self, num_rows: Ints, start: Ints, duration_s: float, *, num_drafts: Ints | int = 0) -> None:
        """Record a forward pass. [seqs]: tokens computed, tokens with KV before them, and drafts among the computed.

        A step whose only long entries are drafts is one without a prompt.
        """
        largest = int((num_rows - num_drafts).max())
        self._is_measured |= largest >= _FIRST_CHUNK_TOKENS
        pairs = (num_rows * (start + num_rows / 2)).sum()
        sizes = np.array([1.0, num_rows.sum(), pairs]) * _SCALE / duration_s
        equations = self._equations[int(largest > 1)]
        equations *= _MEMORY
        equations += np.outer(sizes, np.append(sizes, 1.0))

    def record_swap(self, num_blocks: int, duration_s: float) -> None:
        self._swap_block_s = moving_average(self._swap_block_s, duration_s / num_blocks)

    def record_logprobs(self, num_rows: int, duration_s: float) -> None:
        self._logprob_row_s = moving_average(self._logprob_row_s, duration_s / num_rows)

    def current(self) -> StepCosts:
        if not self._is_measured:
            return StepCosts(swap_block_s=self._swap_block_s, logprob_row_s=self._logprob_row_s)
        step_s, token_s, pair_s = (_solve_non_negative(self._equations.sum(axis=0)) * _SCALE).tolist()
        return StepCosts(
            prefill_token_s=max(token_s, _MIN_TOKEN_S),
            swap_block_s=self._swap_block_s,
            context_token_s=pair_s,
            step_s=step_s,
            logprob_row_s=self._logprob_row_s,
        )


def moving_average(old: float, new: float) -> float:
    """Return the average with a new value; `old`: 0 without an earlier one."""
    return old + _NEWEST_WEIGHT * (new - old) if old else new


def _solve_non_negative(equations: Floats) -> Floats:
    """Solve the normal equations [3, 4] by least squares; a cost that would be negative is zero."""
    matrix, side = equations[:, :3] + _RIDGE * np.trace(equations[:, :3]) * np.eye(3), equations[:, 3]
    costs, active = np.zeros(3), [0, 1, 2]
    while active:
        solution = np.linalg.solve(matrix[np.ix_(active, active)], side[active])
        if solution.min() >= 0:
            costs[active] = solution
            break
        active.pop(int(solution.argmin()))
    return costs
