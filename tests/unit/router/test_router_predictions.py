"""Predictions of long prompts enter the index after the request was sent. Requests that replicas report from other
routers are predicted like the router's own.
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


def test_a_long_prompt_schedules_the_index_update(index, picker, put_off):
    fed, short, long = FedReplica(index, "a"), prompt_of([1, 2]), prompt_of(range(100, 200))
    send(picker, fed, short)
    assert not put_off
    send(picker, fed, long)
    assert index.match(long.hashes, [fed.blocks.slot]) == {}
    put_off.pop()()
    assert index.match(long.hashes, [fed.blocks.slot]) == {fed.blocks.slot: Match(100, predicted=100)}
    assert index.match(short.hashes, [fed.blocks.slot]) == {fed.blocks.slot: Match(2, predicted=2)}


def test_a_sibling_in_the_same_turn_sees_the_prediction(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 1600
    put_off.pop()()
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 1600


def test_a_failure_before_the_update_keeps_other_predictions(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    send(picker, fed, prompt).release("unknown")
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 1600


def test_a_failure_before_the_update_leaves_no_prediction(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt).release("unknown")
    put_off.pop()()
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 0


def test_a_stream_broken_before_the_update_leaves_a_clean_slot(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    fed.lose()
    while index.sweep(100):
        pass
    other = FedReplica(index, "b")
    put_off.pop()()
    assert picker.pick(prompt, [other.replica]).expected_tokens == 0


def test_blocks_reported_before_the_update_are_not_predicted(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt)
    fed.publish_step(stored=range(100, 150))
    put_off.pop()()
    assert picker.pick(prompt, [fed.replica]).candidates[0].match == Match(100, predicted=50)


def come(picker, fed, hashes, **load):
    fed.publish_step(ReplicaLoad(free_blocks=1000, total_blocks=1000, **load), coming=hashes)
    picker.record_load(fed.replica)


def found(picker, fed, hashes):
    return picker.pick(prompt_of(hashes), [fed.replica]).candidates[0].match


def test_coming_blocks_of_another_router_are_predicted_until_expiry(index, picker, clock):
    fed = FedReplica(index, "a", device=[1])
    come(picker, fed, [2, 3], received=1)
    assert found(picker, fed, [1, 2, 3]) == Match(3, predicted=2)
    clock.now_s += MIN_PREDICTED_S
    assert found(picker, fed, [1, 2, 3]) == Match(1)


def test_coming_blocks_are_predicted_for_the_time_of_the_queue(index, picker, clock):
    fed = FedReplica(index, "a")
    come(picker, fed, [2, 3], received=1, waiting=1, prefill_backlog_tokens=50_000)
    clock.now_s += 2 * 50_000 * fed.replica.local_load.rates.token_s - 0.1
    assert found(picker, fed, [2, 3]) == Match(2, predicted=2)
    clock.now_s += 0.1
    assert found(picker, fed, [2, 3]) == Match(0)


def test_stored_coming_blocks_are_no_longer_predicted(index, picker, clock):
    fed = FedReplica(index, "a")
    come(picker, fed, [2, 3])
    fed.publish_step(stored=[2])
    clock.now_s += MIN_PREDICTED_S
    assert found(picker, fed, [2, 3]) == Match(1)


def test_the_routers_own_request_is_not_predicted_twice(index, picker):
    """The replica reports the request too. A failed request removes all blocks that it alone predicted."""
    fed = FedReplica(index, "a")
    lease = send(picker, fed, prompt_of([1, 2, 3]))
    come(picker, fed, [1, 2, 3], received=1)
    assert found(picker, fed, [1, 2, 3]) == Match(3, predicted=3)
    lease.release("unknown")
    assert found(picker, fed, [1, 2, 3]) == Match(0)


def test_a_failed_own_request_keeps_coming_blocks_of_another(index, picker):
    fed = FedReplica(index, "a")
    come(picker, fed, [1, 2])
    send(picker, fed, prompt_of([1, 2, 3])).release("unknown")
    assert found(picker, fed, [1, 2, 3]) == Match(2, predicted=2)


def test_expired_coming_blocks_keep_a_longer_own_prediction(index, picker, clock):
    fed, prompt = FedReplica(index, "a"), prompt_of([1, 2])
    fed.publish_step(ReplicaLoad(free_blocks=1000, total_blocks=1000, prefill_backlog_tokens=50_000))
    send(picker, fed, prompt)
    come(picker, fed, [1, 2, 3], received=1)
    clock.now_s += MIN_PREDICTED_S
    assert found(picker, fed, [1, 2, 3]) == Match(2, predicted=2)


def test_coming_blocks_count_towards_the_limit(index, picker, clock, monkeypatch):
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
