"""How long to wait before the next try: doubling, with jitter, so that many routers don't come back all at once."""

import random


class Backoff:
    """`ended` after a try: one that had gone well for `stable_s` begins anew. Nothing here looks at a clock."""

    def __init__(
        self, *, least_s: float, most_s: float, stable_s: float = 5.0, dice: random.Random | None = None
    ) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._stable_s = stable_s
        self._next_s = least_s
        self._dice = dice or random.Random()

    def ended(self, *, lasted_s: float) -> float:
        """Seconds to wait now."""
        if lasted_s >= self._stable_s:
            self._next_s = self._least_s
        wait_s, self._next_s = self._next_s, min(self._most_s, self._next_s * 2)
        return wait_s * self._dice.uniform(0.5, 1.0)
