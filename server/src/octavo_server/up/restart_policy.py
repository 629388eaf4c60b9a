"""`RestartPolicy`: whether and when a process that ended by itself is started again. Pure; looks at no clock.

Each try waits twice as long as the one before. One that served for a while begins anew: a crash a day isn't a crash
loop. Who ends before it was ever ready isn't started again at all: it would fail alike.
"""

LEAST_S, MOST_S = 1.0, 30.0
MAX_IN_A_ROW = 5
STABLE_S = 60.0


class RestartPolicy:
    def __init__(self) -> None:
        self.num_in_a_row = 0
        self.has_served = False

    def record_exit(self, *, served_s: float) -> float | None:
        """`served_s`: since it was ready, 0 if it wasn't. Seconds to wait before the next start; None: give up."""
        self.has_served = self.has_served or served_s > 0
        if served_s >= STABLE_S:
            self.num_in_a_row = 0
        self.num_in_a_row += 1
        if not self.has_served or self.num_in_a_row > MAX_IN_A_ROW:
            return None
        return min(MOST_S, LEAST_S * 2.0 ** (self.num_in_a_row - 1))
