"""A bounded cache that a flood doesn't empty."""

from hypothesis import given
from hypothesis import strategies as st
from octavo_server.router.prompts.two_queue_cache import ENTRY_BYTES, TwoQueueCache


def full_of(count):
    return TwoQueueCache(count * ENTRY_BYTES)


def test_the_oldest_unread_entry_is_evicted_first():
    cache = full_of(8)  # two of them are on trial
    for key in "abc":
        cache.put(key, key, 0)
    assert [cache.get(key) for key in "abc"] == [None, "b", "c"]


def test_a_flood_keeps_entries_that_were_read():
    cache = full_of(16)
    for key in "abc":
        cache.put(key, key.upper(), 0)
        assert cache.get(key) == key.upper()
    for number in range(1000):
        cache.put(str(number), "x", 0)
    assert [cache.get(key) for key in "abc"] == ["A", "B", "C"]


def test_the_least_recently_read_entry_is_evicted():
    cache = full_of(4)
    for key in "abcd":
        cache.put(key, key, 0)
        assert cache.get(key) == key
    assert [cache.get(key) for key in "abcd"] == [None, "b", "c", "d"]


def test_an_entry_larger_than_the_trial_queue_is_dropped():
    cache = full_of(8)
    cache.put("a", "a", 3 * ENTRY_BYTES)
    assert (cache.get("a"), len(cache), cache.num_bytes) == (None, 0, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 3 * ENTRY_BYTES))))
def test_the_size_stays_within_the_limit_and_is_counted_right(events):
    cache, room = full_of(12), 12 * ENTRY_BYTES
    for is_put, key, size in events:
        if is_put:
            cache.put(key, size, size)
        else:
            assert cache.get(key) in (None, *(size for _, k, size in events if k == key))
        held = [entry for part in (cache._trial, cache._kept) for entry in part.values()]
        assert cache.num_bytes == sum(size for _, size in held) <= room
