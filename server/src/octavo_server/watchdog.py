"""Says when an engine that has work doesn't get on with it. Pure: it is shown what can be seen, and the time.

Progress is a finished step. A step may take long (a big prefill, a first compilation), so while nothing at all is
heard from the engine core, CPU time that it uses counts as progress too, up to `LONGEST_STEP` times the timeout. A core
that sends messages without making a step, uses no CPU, or is stopped, gets no such grace.
"""

from dataclasses import dataclass

from octavo_engine.wire.records import EngineStats

LONGEST_STEP = 10
BUSY_SHARE = 0.05  # of one core, between two looks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """What can be seen of an engine core from outside; each message brings a new `stats`."""

    num_unfinished: int
    stats: EngineStats
    cpu_s: float


class StallDetector:
    """`observe` is to be called every second or so; `timeout_s` 0 turns it off."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: EngineSnapshot | None = None
        self._observed_s = self._stepped_s = self._busy_s = 0.0

    def observe(self, snapshot: EngineSnapshot, now: float) -> None:
        last, self._last = self._last, snapshot
        elapsed, self._observed_s = now - self._observed_s, now
        if (
            last is None
            or not snapshot.num_unfinished
            or not last.num_unfinished
            or snapshot.stats.steps != last.stats.steps
        ):
            self._stepped_s = self._busy_s = now
        elif snapshot.stats is last.stats and snapshot.cpu_s - last.cpu_s > BUSY_SHARE * elapsed:
            self._busy_s = now

    def stall_reason(self, now: float) -> str | None:
        """Why the engine counts as stalled; None while all is well."""
        limit, last = self._timeout_s, self._last
        if not limit or last is None or not last.num_unfinished:
            return None
        stepless_s, idle_s = now - self._stepped_s, now - max(self._stepped_s, self._busy_s)
        if idle_s < limit and stepless_s < limit * LONGEST_STEP:
            return None
        return f"unfinished requests: {last.num_unfinished}; no step was completed for {stepless_s:.0f} s"
