"""`StallDetector` detects an engine that makes no progress. Pure: it gets snapshots and times.

Progress is a finished step and, without unfinished requests, an answer to the probe that the core gets each second.
That a client has left is no progress, as clients that give up early would keep a core healthy that hangs.
A step may take long (a big prefill, a first compilation), so while the engine core sends no message at all, the CPU
time that it uses counts as progress too, up to `LONGEST_STEP` times the timeout. A core that sends messages but
finishes no step, or that uses no CPU time, makes no progress.
"""

from dataclasses import dataclass

from octavo_engine.wire.records import EngineStats

LONGEST_STEP = 10
BUSY_SHARE = 0.05  # CPU use, as a share of one CPU core between two snapshots, from which on the process is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """State of the engine core as its client sees it. Each message of the core brings a new `stats` object. `cpu_s`:
    CPU seconds that its process has used. `num_answers`: probes that it has answered."""

    num_unfinished: int
    stats: EngineStats
    cpu_s: float
    num_answers: int


class StallDetector:
    """`observe` must be called about once a second. `timeout_s`: seconds without progress; 0 turns the detector off."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: EngineSnapshot | None = None
        self._observed_s = self._stepped_s = self._busy_s = 0.0

    def observe(self, snapshot: EngineSnapshot, now: float) -> None:
        last, self._last = self._last, snapshot
        elapsed, self._observed_s = now - self._observed_s, now
        had_no_work = last is None or not (snapshot.num_unfinished and last.num_unfinished)
        if (
            last is None
            or snapshot.stats.steps != last.stats.steps
            or (had_no_work and snapshot.num_answers != last.num_answers)
        ):
            self._stepped_s = self._busy_s = now
        elif snapshot.stats is last.stats and snapshot.cpu_s - last.cpu_s > BUSY_SHARE * elapsed:
            self._busy_s = now

    def stall_reason(self, now: float) -> str | None:
        """Return the reason why the engine counts as stalled; None if it doesn't."""
        limit, last = self._timeout_s, self._last
        if not limit or last is None:
            return None
        stepless_s, idle_s = now - self._stepped_s, now - max(self._stepped_s, self._busy_s)
        if idle_s < limit and stepless_s < limit * LONGEST_STEP:
            return None
        return f"unfinished requests: {last.num_unfinished}; no progress for {stepless_s:.0f} s"
