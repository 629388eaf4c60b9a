"""The costs of computing a token and of moving a block, measured while serving; inputs of the scheduler's decisions."""

import numpy as np
import numpy.typing as npt

from octavo_engine.wire.plan import StepCosts

_LARGE_CHUNK_TOKENS = 128
_WEIGHT = 0.2  # weight of the newest measurement


class CostMeter:
    """Moving averages of the costs; 0 means that a cost is not measured yet."""

    def __init__(self) -> None:
        self._prefill_token_s = 0.0
        self._swap_block_s = 0.0

    def record_forward(self, num_rows: npt.NDArray[np.int64], duration_s: float) -> None:
        """Record a forward pass if its prefill chunks have at least 128 tokens together, and 90 % of all its tokens."""
        prefill = int(num_rows[num_rows > 1].sum())
        if prefill >= max(_LARGE_CHUNK_TOKENS, 0.9 * num_rows.sum()):
            self._prefill_token_s = _average(self._prefill_token_s, duration_s / prefill)

    def record_swap(self, num_blocks: int, duration_s: float) -> None:
        self._swap_block_s = _average(self._swap_block_s, duration_s / num_blocks)

    def current(self) -> StepCosts:
        return StepCosts(prefill_token_s=self._prefill_token_s, swap_block_s=self._swap_block_s)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
