"""What a long prompt predicts goes into the index when its request is out."""

import pytest
from octavo_server.router.picker import Picker
from octavo_server.router.prefix_index import Match, PrefixIndex
from octavo_testing.clock import Clock
from octavo_testing.router_replicas import FedReplica, prompt_of


@pytest.fixture
def index():
    return PrefixIndex(max_entries=10_000)


@pytest.fixture
def put_off():
    return []


@pytest.fixture
def picker(index, put_off):
    return Picker(index, clock=Clock(100.0), soon=put_off.append)


def send(picker, fed, prompt):
    return picker.sent(picker.pick(prompt, [fed.replica]), prompt)


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
    send(picker, fed, prompt).ended(ok=False)
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 1600


def test_one_that_failed_before_is_not_predicted(index, picker, put_off):
    fed, prompt = FedReplica(index, "a"), prompt_of(range(100, 200))
    send(picker, fed, prompt).ended(ok=False)
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
