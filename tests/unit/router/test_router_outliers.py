"""Ejection of replicas that fail more often than their peers, and the budget of retries."""

import pytest
from octavo_server.router.balance.outliers import EJECTED_S, OutlierDetector
from octavo_server.router.proxy.retries import MAX_RETRIES, REQUESTS_PER_RETRY, RetryBudget

PEERS = ["a", "b", "c", "d"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def detector(clock):
    return OutlierDetector(clock)


def fail(detector, name, times=3, peers=PEERS):
    for _ in range(times):
        detector.record_error(name, peers)


def test_a_replica_that_fails_alone_is_ejected_for_a_while(detector, clock):
    for name in "bcd":
        detector.record_success(name)
    fail(detector, "a", 2)
    assert not detector.is_ejected("a")
    fail(detector, "a", 1)
    assert [name for name in PEERS if detector.is_ejected(name)] == ["a"]
    clock.now += EJECTED_S
    assert not detector.is_ejected("a")
    assert not detector


def test_a_repeated_ejection_lasts_twice_as_long(detector, clock):
    fail(detector, "a")
    clock.now += EJECTED_S
    fail(detector, "a")
    clock.now += 2 * EJECTED_S - 0.1
    assert detector.is_ejected("a")
    clock.now += 0.1
    assert not detector.is_ejected("a")


def test_a_request_that_fails_everywhere_ejects_no_replica(detector):
    for _ in range(20):
        for name in PEERS:
            detector.record_error(name, PEERS)
    assert sum(map(detector.is_ejected, PEERS)) <= 1  # the first errors can't be compared with those of peers


def test_a_few_errors_among_many_successes_eject_no_replica(detector):
    for _ in range(30):
        detector.record_success("a")
    fail(detector, "a", 5)
    assert not detector.is_ejected("a")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_never_more_than_half_of_the_replicas_are_ejected(detector, count):
    names = [str(number) for number in range(count)]
    for name in names:
        fail(detector, name, 10, names)
    assert sum(map(detector.is_ejected, names)) <= count // 2


def test_a_forgotten_replica_starts_without_records(detector):
    fail(detector, "a")
    detector.forget("a")
    assert not detector.is_ejected("a")
    assert not detector


def test_retries_are_a_share_of_requests_once_the_budget_is_empty():
    budget = RetryBudget()
    assert sum(budget.withdraw() for _ in range(5000)) == MAX_RETRIES
    for _ in range(50):
        budget.deposit()
    assert sum(budget.withdraw() for _ in range(50)) == 50 / REQUESTS_PER_RETRY
