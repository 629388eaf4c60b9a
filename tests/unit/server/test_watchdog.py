import pytest
from octavo_engine.wire.records import EngineStats
from octavo_server.watchdog import LONGEST_STEP, EngineSnapshot, StallDetector

TIMEOUT_S = 30


class Engine:
    """An engine that is observed once a second."""

    def __init__(self, timeout_s=TIMEOUT_S):
        self.watch = StallDetector(timeout_s)
        self.now, self.cpu_s, self.unfinished = 1000.0, 5.0, 0
        self.stats = EngineStats()

    def pass_time(self, seconds, *, steps=False, messages=False, cpu=0.0):
        """Seconds until the engine counts as stalled, None if it doesn't."""
        for second in range(seconds):
            self.now += 1
            self.cpu_s += cpu
            if steps or messages:
                self.stats = EngineStats(steps=self.stats.steps + steps)
            self.watch.observe(
                EngineSnapshot(num_unfinished=self.unfinished, stats=self.stats, cpu_s=self.cpu_s), self.now
            )
            if self.watch.stall_reason(self.now):
                return second
        return None


@pytest.fixture
def engine():
    return Engine()


def test_an_idle_engine_never_stalls(engine):
    assert engine.pass_time(1000) is None


def test_the_timeout_starts_with_the_work_not_with_the_last_step(engine):
    engine.pass_time(1000)
    engine.unfinished = 3
    assert engine.pass_time(1000) == TIMEOUT_S
    assert "unfinished requests: 3;" in engine.watch.stall_reason(engine.now)


def test_steps_keep_it_healthy(engine):
    engine.unfinished = 1
    assert engine.pass_time(1000, steps=True) is None
    assert engine.pass_time(1000) == TIMEOUT_S - 1


def test_a_long_step_is_no_stall_while_it_computes(engine):
    engine.unfinished = 1
    assert engine.pass_time(TIMEOUT_S * 5, cpu=0.9) is None
    assert engine.pass_time(1, steps=True) is None
    assert engine.pass_time(TIMEOUT_S * 5, cpu=0.9) is None
    assert engine.pass_time(1000) == TIMEOUT_S - 1


def test_an_endless_step_is_a_stall_in_the_end(engine):
    engine.unfinished = 1
    assert engine.pass_time(1000, cpu=1.0) == TIMEOUT_S * LONGEST_STEP


def test_messages_without_steps_are_no_progress(engine):
    engine.unfinished = 1
    assert engine.pass_time(1000, messages=True, cpu=1.0) == TIMEOUT_S


def test_a_stalled_engine_recovers(engine):
    engine.unfinished = 1
    assert engine.pass_time(1000) is not None
    assert engine.pass_time(1, steps=True) is None


def test_a_timeout_of_0_turns_the_detector_off():
    engine = Engine(timeout_s=0)
    engine.unfinished = 1
    assert engine.pass_time(10_000) is None
