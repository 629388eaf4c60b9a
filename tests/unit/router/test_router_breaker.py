"""Circuit breakers with a clock that the test sets."""

import pytest
from octavo_server.router.balance.breaker import MOST_OPEN_S, PROBE_S, Breakers
from octavo_testing.clock import Clock


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def breakers(clock):
    return Breakers(max_failures=3, open_s=1.0, clock=clock)


def fail(breakers, times):
    for _ in range(times):
        breakers.record_failure("a")


def test_replicas_that_never_fail_have_no_breaker(breakers):
    breakers.record_dispatch("a")
    breakers.record_success("a")
    assert not breakers
    assert breakers.allows("a")


def test_a_breaker_opens_after_several_failures_in_a_row(breakers):
    fail(breakers, 2)
    breakers.record_success("a")
    fail(breakers, 2)
    assert breakers.allows("a")
    fail(breakers, 1)
    assert not breakers.allows("a")
    assert breakers.allows("b")


def test_a_half_open_breaker_allows_one_probe(breakers, clock):
    fail(breakers, 3)
    clock.now_s += 1.0
    assert (breakers.allows("a"), breakers.state("a")) == (True, "half-open")
    breakers.record_dispatch("a")
    assert not breakers.allows("a")
    breakers.record_success("a")
    assert (breakers.allows("a"), breakers.state("a")) == (True, "closed")


def test_each_failed_probe_doubles_the_time_up_to_a_limit(breakers, clock):
    fail(breakers, 3)
    for open_s in (1.0, 2.0, 4.0, 8.0, 16.0, MOST_OPEN_S, MOST_OPEN_S):
        clock.now_s += open_s - 0.01
        assert not breakers.allows("a")
        clock.now_s += 0.02
        assert breakers.allows("a")
        breakers.record_dispatch("a")
        fail(breakers, 1)


def test_a_probe_without_evidence_allows_the_next(breakers, clock):
    fail(breakers, 3)
    clock.now_s += 1.0
    breakers.record_dispatch("a")
    breakers.release_probe("a")
    assert breakers.allows("a")


def test_a_probe_without_an_outcome_expires(breakers, clock):
    fail(breakers, 3)
    clock.now_s += 1.0
    breakers.record_dispatch("a")
    clock.now_s += PROBE_S
    assert breakers.allows("a")
