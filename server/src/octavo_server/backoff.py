"""`Backoff` computes the wait before the next try. The wait doubles with each failure, with jitter, so that many
processes that lost one server don't return to it at the same moment. `Backoff` reads no clock.
"""

import random


class Backoff:
    """Waits from `least_s` to `most_s`. A try that lasted for `stable_s` or longer resets the wait to `least_s`."""

    def __init__(
        self, *, least_s: float, most_s: float, stable_s: float = 5.0, dice: random.Random | None = None
    ) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._stable_s = stable_s
        self._next_s = least_s
        self._dice = dice or random.Random()

    def next_wait_s(self, *, lasted_s: float) -> float:
        """Return the seconds to wait before the next try, after a try that took `lasted_s`."""
        if lasted_s >= self._stable_s:
            self._next_s = self._least_s
        wait_s, self._next_s = self._next_s, min(self._most_s, self._next_s * 2)
        return wait_s * self._dice.uniform(0.5, 1.0)
