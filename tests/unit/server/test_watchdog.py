import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.wire.records import EngineStats
from octavo_server.watchdog import LONGEST_STEP, EngineSnapshot, StallDetector

TIMEOUT_S = 30


class Engine:
    """An engine that is observed once a second. `answers`: whether it answers the probe of each second."""

    def __init__(self, timeout_s=TIMEOUT_S):
        self.watch = StallDetector(timeout_s)
        self.now, self.cpu_s, self.unfinished = 1000.0, 5.0, 0
        self.stats = EngineStats()
        self.answers, self.num_answers = True, 0

    def pass_time(self, seconds, *, steps=False, messages=False, cpu=0.0, unfinished=None):
        """Seconds until the engine counts as stalled, None if it doesn't. `unfinished`: its numbers, in turn."""
        numbers = itertools.repeat(None) if unfinished is None else itertools.cycle(unfinished)
        for second, number in zip(range(seconds), numbers, strict=False):
            self.now += 1
            self.cpu_s += cpu
            self.num_answers += self.answers
            self.unfinished = self.unfinished if number is None else number
            if steps or messages:
                self.stats = EngineStats(steps=self.stats.steps + steps)
            self.watch.observe(
                EngineSnapshot(
                    num_unfinished=self.unfinished,
                    stats=self.stats,
                    cpu_s=self.cpu_s,
                    num_answers=self.num_answers,
                ),
                self.now,
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


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_a_stopped_core_is_found_whenever_its_clients_leave(unfinished):
    engine = Engine()
    assert engine.pass_time(50, steps=True, unfinished=unfinished) is None
    engine.answers = False
    assert engine.pass_time(2 * TIMEOUT_S, unfinished=unfinished) == TIMEOUT_S - 1


def test_clients_that_leave_early_end_no_stall(engine):
    engine.pass_time(10)
    engine.answers = False
    assert engine.pass_time(2 * TIMEOUT_S, unfinished=[1, 1, 1, 0, 0]) is not None
    assert engine.pass_time(1000, unfinished=[1, 0]) == 0
    engine.answers = True
    assert engine.pass_time(600, unfinished=[0]) is None


def test_a_long_step_whose_client_has_left_is_no_stall_while_it_computes(engine):
    engine.answers = False
    assert engine.pass_time(TIMEOUT_S * 5, cpu=0.9, unfinished=[0]) is None
    assert engine.pass_time(1000) == TIMEOUT_S - 1


def test_a_timeout_of_0_turns_the_detector_off():
    engine = Engine(timeout_s=0)
    engine.unfinished = 1
    assert engine.pass_time(10_000) is None
