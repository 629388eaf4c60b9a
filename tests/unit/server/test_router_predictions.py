"""What is predicted: what a long prompt predicts goes into the index when its request is out, and what replicas tell of
others' requests is predicted as our own is.
"""

import pytest
from octavo_server.kv.frames import ReplicaLoad
from octavo_server.router.balance.lease import FAILED_LOAD_S, MIN_PREDICTED_S
from octavo_server.router.balance.picker import Picker
from octavo_server.router.fleet.prefix_index import Match, PrefixIndex
from octavo_testing.clock import Clock
from octavo_testing.router_replicas import FedReplica, prompt_of


@pytest.fixture
def index():
    return PrefixIndex(max_entries=10_000)


@pytest.fixture
def put_off():
    return []


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def picker(index, put_off, clock):
    return Picker(index, clock=clock, call_soon=put_off.append)


def send(picker, fed, prompt):
    return picker.lease(picker.pick(prompt, [fed.replica]), prompt)


def test_a_long_prompt_asks_for_it_and_a_short_one_leaves_it_to_the_next(index, picker, put_off):
    fed, short, long = FedReplica(index, "a"), prompt_of([1, 2]), prompt_of(range(100, 200))
    send(picker, fed, short)
    assert not put_off
    send(picker, fed, long)
    assert index.match(long.hashes, [fed.blocks.slot]) == {}
    put_off.pop()()
    assert index.match(long.hashes, [fed.blocks.slot]) == {fed.blocks.slot: Match(100, predicted=100)}
    assert index.match(short.hashes, [fed.blocks.slot]) == {fed.blocks.slot: Match(2, predicted=2)}


def test_a_sibling_in_the_same_turn_need_not_wait_for_it(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 1600
    put_off.pop()()
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 1600


def test_one_that_failed_before_takes_nothing_of_another_back(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    send(picker, fed, prompt).release("unknown")
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 1600


def test_one_that_failed_before_is_not_predicted(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt).release("unknown")
    put_off.pop()()
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 0


def test_a_stream_that_broke_before_leaves_nothing_to_who_has_its_slot_next(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    fed.lose()
    while index.sweep(100):
        pass
    other = FedReplica(index, "b")
    put_off.pop()()
    assert picker.pick(prompt, [other.replica]).expected_tokens == 0


def test_what_a_frame_named_before_is_not_predicted(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    fed.tell(stored=range(100, 150))
    put_off.pop()()
    assert picker.pick(prompt, [fed.replica]).candidates[0].match == Match(100, predicted=50)


def come(picker, fed, hashes, **load):
    fed.tell(ReplicaLoad(free_blocks=1000, total_blocks=1000, **load), coming=hashes)
    picker.record_load(fed.replica)


def found(picker, fed, hashes):
    return picker.pick(prompt_of(hashes), [fed.replica]).candidates[0].match


def test_what_comes_for_another_routers_request_is_predicted_until_it_expires(index, picker, clock):
    fed = FedReplica(index, "a", device=[1])
    come(picker, fed, [2, 3], received=1)
    assert found(picker, fed, [1, 2, 3]) == Match(3, predicted=2)
    clock.now_s += MIN_PREDICTED_S
    assert found(picker, fed, [1, 2, 3]) == Match(1)


def test_it_is_predicted_for_as_long_as_what_is_before_it_takes(index, picker, clock):
    fed = FedReplica(index, "a")
    come(picker, fed, [2, 3], received=1, waiting=1, prefill_backlog_tokens=50_000)
    clock.now_s += 2 * 50_000 * fed.replica.local_load.rates.token_s - 0.1
    assert found(picker, fed, [2, 3]) == Match(2, predicted=2)
    clock.now_s += 0.1
    assert found(picker, fed, [2, 3]) == Match(0)


def test_what_comes_and_is_stored_is_there(index, picker, clock):
    fed = FedReplica(index, "a")
    come(picker, fed, [2, 3])
    fed.tell(stored=[2])
    clock.now_s += MIN_PREDICTED_S
    assert found(picker, fed, [2, 3]) == Match(1)


def test_our_own_request_is_not_predicted_twice(index, picker):
    """The replica tells of it, too; what failed takes all back that it alone predicted."""
    fed = FedReplica(index, "a")
    ticket = send(picker, fed, prompt_of([1, 2, 3]))
    come(picker, fed, [1, 2, 3], received=1)
    assert found(picker, fed, [1, 2, 3]) == Match(3, predicted=3)
    ticket.release("unknown")
    assert found(picker, fed, [1, 2, 3]) == Match(0)


def test_ours_that_fails_leaves_what_comes_for_another(index, picker):
    fed = FedReplica(index, "a")
    come(picker, fed, [1, 2])
    send(picker, fed, prompt_of([1, 2, 3])).release("unknown")
    assert found(picker, fed, [1, 2, 3]) == Match(2, predicted=2)


def test_what_comes_ends_nothing_of_ours_that_lasts_longer(index, picker, clock):
    fed, prompt = FedReplica(index, "a"), prompt_of([1, 2])
    fed.tell(ReplicaLoad(free_blocks=1000, total_blocks=1000, prefill_backlog_tokens=50_000))
    send(picker, fed, prompt)
    come(picker, fed, [1, 2, 3], received=1)
    clock.now_s += MIN_PREDICTED_S
    assert found(picker, fed, [1, 2, 3]) == Match(2, predicted=2)


def test_what_comes_has_the_limit_of_all_that_is_predicted(index, picker, clock, monkeypatch):
    monkeypatch.setattr("octavo_server.router.balance.predictions.MAX_BLOCKS", 25)
    fed = FedReplica(index, "a")
    for first in (100, 200, 300):
        come(picker, fed, range(first, first + 10))
        clock.now_s += 0.1
    assert [found(picker, fed, range(first, first + 10)).blocks for first in (100, 200, 300)] == [0, 10, 10]


def test_an_error_leaves_no_predicted_blocks(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    lease = send(picker, fed, prompt)
    lease.record_first_byte(is_error=True)
    lease.release("failed")
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 0


def test_a_failed_request_counts_as_load_for_some_seconds(index, picker, clock):
    failing, other, prompt = FedReplica(index, "a"), FedReplica(index, "b"), prompt_of(range(100, 110))
    send(picker, failing, prompt).release("failed")
    load = failing.replica.local_load
    assert (load.num_in_flight, load.num_failed, load.failed_tokens) == (0, 1, prompt.num_tokens)
    assert picker.pick(prompt, [failing.replica, other.replica]).chosen is other.replica
    clock.now_s += FAILED_LOAD_S
    picker.pick(prompt, [other.replica])
    assert (load.num_failed, load.failed_tokens) == (0, 0)
