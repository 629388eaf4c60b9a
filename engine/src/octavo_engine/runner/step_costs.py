"""The costs of a step and of moving a block, measured while serving; inputs of the scheduler's decisions.

A step is modelled as `step_s + tokens * prefill_token_s + pairs * context_token_s`, where `pairs` counts, for each
token, the tokens before it in its sequence. The three costs are the least-squares fit of the relative error over
recent steps. Steps with and without a prompt are weighed separately, so that decoding for long does not erase what a
prompt costs. Steps without one, which are alike, are added up and enter the fit some at a time.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo_engine.wire.plan import StepCosts

_FIRST_CHUNK_TOKENS = 16  # a chunk of at least this size must be measured before costs are reported
_STEPS_AT_A_TIME = 16  # without a prompt
_MEMORY = 0.98  # weight of a step relative to the next one of its kind: about 50 steps count
_SCALE = np.array([1.0, 1 / 16, 1 / 65536])  # of steps, tokens, pairs: a single sample is mostly a cost of its tokens
_RIDGE = 1e-9  # relative to the matrix; decides between solutions that fit equally well
_MIN_TOKEN_S = 1e-9
_NEWEST_WEIGHT = 0.2  # in averages of swaps and log-probabilities

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class CostMeter:
    """Moving averages of the costs; 0 means that a cost is not measured yet."""

    def __init__(self) -> None:
        # For steps without and with a prompt: the sums of steps, tokens, pairs and seconds that are not in the fit yet,
        # and the normal equations (the matrix; its last column is the right side).
        self._sums = np.zeros((2, 4))
        self._equations = np.zeros((2, 3, 4))
        self._is_measured = False
        self._costs = StepCosts()

    def record_forward(self, num_rows: Ints, start: Ints, duration_s: float, *, num_drafts: Ints | int = 0) -> None:
        """Record a forward pass. [seqs]: tokens computed, tokens with KV before them, and drafts among the computed.

        A step whose only long entries are drafts counts as one without a prompt.
        """
        largest = int((num_rows - num_drafts).max())
        self._is_measured |= largest >= _FIRST_CHUNK_TOKENS
        kind = int(largest > 1)
        self._sums[kind] += 1.0, num_rows.sum(), num_rows @ (start + num_rows / 2), duration_s
        is_first = not self._equations[kind, 0, 0]
        if kind or is_first or self._sums[kind, 0] >= _STEPS_AT_A_TIME:
            self._fit(kind)

    def _fit(self, kind: int) -> None:
        (num_steps, *sums, seconds), equations = self._sums[kind], self._equations[kind]
        sizes = np.array([num_steps, *sums]) * _SCALE / seconds
        equations *= _MEMORY**num_steps
        equations += num_steps * np.outer(sizes, np.append(sizes, 1.0))
        self._sums[kind] = 0.0
        if self._is_measured:
            step_s, token_s, pair_s = (_solve_non_negative(self._equations.sum(axis=0)) * _SCALE).tolist()
            token_s = max(token_s, _MIN_TOKEN_S)
            self._costs = replace(self._costs, prefill_token_s=token_s, context_token_s=pair_s, step_s=step_s)

    def record_swap(self, num_blocks: int, duration_s: float) -> None:
        average = moving_average(self._costs.swap_block_s, duration_s / num_blocks)
        self._costs = replace(self._costs, swap_block_s=average)

    def record_logprobs(self, num_rows: int, duration_s: float) -> None:
        average = moving_average(self._costs.logprob_row_s, duration_s / num_rows)
        self._costs = replace(self._costs, logprob_row_s=average)

    def current(self) -> StepCosts:
        return self._costs


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
