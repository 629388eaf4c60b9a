"""The bounded queue, with a test clock."""

import pytest
from octavo_engine.wire.errors import InvalidRequest, Overloaded
from octavo_server.api.admission import Admission
from octavo_server.config import QueueLimits
from octavo_testing.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def refusals():
    return []


@pytest.fixture
def admission(clock, refusals):
    def make(max_running=2, **limits):
        limits = QueueLimits(**{"max_num_queued_reqs": None, **limits})
        return Admission(limits, max_running=max_running, clock=clock, on_refusal=lambda: refusals.append(1))

    return make


def enter(admission, tenant="", num_seqs=1, num_tokens=1):
    admission.check(tenant)
    return admission.admit(tenant, num_seqs=num_seqs, num_tokens=num_tokens).__enter__()


def leave(admitted):
    admitted.__exit__(None, None, None)


def test_full_queue_rejects_until_a_request_ends(admission, refusals):
    queue = admission(max_num_queued_reqs=3)
    one, _ = enter(queue), enter(queue, num_seqs=2)
    with pytest.raises(Overloaded, match=r"3 requests are in progress, the limit is 3 \(--max-num-queued-reqs\)"):
        queue.check("")
    leave(one)
    queue.check("")
    assert refusals == [1]


def test_large_request_is_not_starved_by_small_ones(admission):
    queue = admission(max_num_queued_reqs=3)
    enter(queue)
    enter(queue, num_seqs=5)
    with pytest.raises(Overloaded):
        queue.check("")


def test_request_with_many_sequences_needs_room_for_all(admission):
    queue = admission(max_num_queued_reqs=8)
    one = enter(queue, num_seqs=3)
    queue.check("", num_seqs=5)
    with pytest.raises(Overloaded, match=r"3 requests are in progress, this request has 6, the limit is 8"):
        queue.check("", num_seqs=6)
    leave(one)
    queue.check("", num_seqs=8)


def test_request_larger_than_the_queue_is_invalid(admission):
    queue = admission(max_num_queued_reqs=8)
    with pytest.raises(InvalidRequest, match=r"9 sequences .* at most 8: .*--max-num-queued-reqs"):
        queue.check("", num_seqs=9)
    admission().check("", num_seqs=2**18)


def test_limit_of_zero_admits_nothing(admission):
    with pytest.raises(Overloaded):
        admission(max_num_queued_reqs=0).check("")


def test_tokens_count_only_until_their_request_starts(admission):
    queue = admission(max_num_queued_tokens=10)
    long = enter(queue, num_tokens=10)
    with pytest.raises(Overloaded, match=r"10 prompt tokens are waiting.*max-num-queued-tokens"):
        queue.check("")
    long.start()
    queue.check("")
    leave(long)
    assert (queue.num_seqs, queue.num_waiting_tokens) == (0, 0)


def test_limit_per_key_does_not_affect_other_keys(admission):
    queue = admission(max_requests_per_key=2)
    tickets = [enter(queue, "heavy"), enter(queue, "heavy")]
    with pytest.raises(Overloaded, match=r"of this API key.*max-requests-per-key"):
        queue.check("heavy")
    enter(queue, "light")
    for _ in range(3):
        enter(queue, "")  # no keys, no tenants
    leave(tickets[0])
    queue.check("heavy")


def test_tenants_without_requests_are_removed(admission):
    queue = admission()
    for number in range(50):
        leave(enter(queue, f"tenant {number}"))
    assert not queue._shares._held


def test_retry_after_follows_the_rate_of_ends(admission, clock):
    queue = admission(max_running=2)
    assert queue.retry_after_s() == 1.0
    done = [enter(queue) for _ in range(10)]
    for admitted in done:
        clock.now_s += 3.0
        leave(admitted)
    assert queue.retry_after_s() == pytest.approx(2.7)
    for _ in range(7):
        enter(queue)
    assert queue.retry_after_s() == pytest.approx(5 * 2.7)
    for _ in range(1000):
        enter(queue)
    assert queue.retry_after_s() == 60.0


def test_a_tenant_keeps_to_half_of_the_queue_while_another_uses_it(admission, refusals):
    queue = admission(max_num_queued_reqs=8)
    queue.check("bob")
    enter(queue, "alice", num_seqs=3)
    queue.check("alice")
    with pytest.raises(Overloaded, match=r"3 requests of this API key are in progress, this request has 2, .* is 4 "):
        queue.check("alice", num_seqs=2)
    queue.check("bob", num_seqs=4)
    assert refusals == [1]


def test_a_tenant_alone_takes_the_whole_queue(admission):
    queue = admission(max_num_queued_reqs=8)
    enter(queue, "alice", num_seqs=7)
    queue.check("alice")
