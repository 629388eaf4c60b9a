import pytest
from octavo_server.router.fleet.prefix_index import HOST, PREDICTED, Match, PrefixIndex


def test_a_prefix_counts_up_to_the_first_gap():
    index = PrefixIndex(max_entries=100)
    a, b = index.acquire_slot(), index.acquire_slot()
    index.store(a, [1, 2, 4])
    index.store(b, [1], HOST)
    index.store(b, [2], PREDICTED)
    assert index.match([1, 2, 3, 4], [a, b]) == {a: Match(2), b: Match(2, host=1, predicted=1)}
    assert index.match([2, 1], [b]) == {b: Match(2, host=1, predicted=1)}
    assert index.match([3], [a, b]) == {}
    assert index.match([1], []) == {}


def test_a_confirmed_block_is_no_longer_predicted():
    index = PrefixIndex(max_entries=100)
    slot = index.acquire_slot()
    index.store(slot, [1, 2], PREDICTED)
    index.store(slot, [1])
    index.remove(slot, [1, 2], PREDICTED)
    assert index.match([1, 2], [slot]) == {slot: Match(1)}


def test_repeated_predictions_are_returned():
    index = PrefixIndex(max_entries=20)
    a, b = index.acquire_slot(), index.acquire_slot()
    assert index.store(a, [1, 2], PREDICTED) == []
    assert index.store(b, [2, 3], PREDICTED) == []
    index.store(a, [1])
    assert index.store(a, [1, 2, 3], PREDICTED) == [2]
    index.store(b, range(10, 18))  # so that the other entries are in the older generation
    assert index.store(a, [2, 3, 4], PREDICTED) == [2, 3]
    assert index.match([1, 2, 3, 4], [a]) == {a: Match(4, predicted=3)}


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_slot_is_reused_only_after_its_entries_are_swept(chunk):
    index = PrefixIndex(max_entries=1000)
    gone, stays = index.acquire_slot(), index.acquire_slot()
    index.store(gone, range(1, 21))
    index.store(stays, range(11, 31))
    index.release_slot(gone)
    other = index.acquire_slot()
    assert other not in (gone, stays)
    while index.sweep(chunk):
        assert index.match([15], [stays, other]) == {stays: Match(1)}
    assert len(index) == 20
    assert index.acquire_slot() == gone
    assert index.match(range(1, 31), [gone]) == {}


def test_the_cap_holds_and_used_entries_stay():
    index = PrefixIndex(max_entries=100)
    slot = index.acquire_slot()
    for first in range(1, 10_000, 10):
        index.store(slot, [-1])
        index.store(slot, range(first, first + 10))
        assert len(index) <= 100
    assert index.num_dropped > 9000
    assert index.match([9_999 - k for k in range(40)], [slot]) == {slot: Match(40)}
    assert index.match([-1], [slot]) == {slot: Match(1)}
    assert index.match([1], [slot]) == {}


def test_a_look_up_keeps_an_entry():
    index = PrefixIndex(max_entries=100)
    slot = index.acquire_slot()
    index.store(slot, [-1])
    for block in range(1, 1000):
        index.store(slot, [block])
        assert index.match([-1], [slot]) == {slot: Match(1)}
