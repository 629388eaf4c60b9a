"""`RestartPolicy`: whether and when a process that ended by itself is restarted. Pure, without a clock.

Each delay is twice the previous delay. After a minute of serving the delay is reset: one crash a day is not a crash
loop. A process that ended before it was ever ready is not restarted, as it would fail again.
"""

LEAST_S, MOST_S = 1.0, 30.0
MAX_IN_A_ROW = 5
STABLE_S = 60.0


class RestartPolicy:
    def __init__(self) -> None:
        self.num_in_a_row = 0
        self.has_served = False

    def record_exit(self, *, served_s: float) -> float | None:
        """Return the seconds until the next start, or None to give up. `served_s`: seconds for which the process was
        ready before it ended; 0 if it never was."""
        self.has_served = self.has_served or served_s > 0
        if served_s >= STABLE_S:
            self.num_in_a_row = 0
        self.num_in_a_row += 1
        if not self.has_served or self.num_in_a_row > MAX_IN_A_ROW:
            return None
        return min(MOST_S, LEAST_S * 2.0 ** (self.num_in_a_row - 1))
