"""`HostTier`: the entries in CPU memory, the order of drops, and the slots that a step may not reuse."""

from octavo_engine.core.events import KVDeltas
from octavo_engine.core.host import HostTier

BLOCK_A, BLOCK_B = b"a" * 32, b"b" * 32


def tier_with(*keys: bytes | tuple[int, int], size: int) -> HostTier:
    tier = HostTier(size)
    for step_id, key in enumerate(keys, start=1):
        tier.begin_step(step_id)
        tier.put(key)
    tier.begin_step(len(keys) + 1)
    return tier


def test_a_full_tier_drops_the_least_recently_used() -> None:
    tier = tier_with(b"a", b"b", size=2)
    tier.find(b"a")
    tier.begin_step(9)
    tier.put(b"c")
    assert tier.find(b"b") is None
    assert tier.find(b"a") is not None
    assert tier.num_dropped == 1
    tier.check()


def test_slots_of_this_step_are_not_reused_in_it() -> None:
    tier = tier_with(b"a", size=2)
    read = tier.find(b"a")
    written = tier.put(b"b")
    assert written not in (read, None)
    assert tier.put(b"c") is None, "both slots are in use by this step"
    assert tier.num_dropped == 1
    tier.begin_step(9)
    assert tier.put(b"c") == read
    tier.check()


def test_a_private_entry_read_in_this_step_frees_its_slot_in_the_next() -> None:
    tier = tier_with((7, 0), size=1)
    assert tier.find((7, 0)) == 0
    tier.discard((7, 0))
    assert tier.put(b"a") is None
    assert tier.num_used == 1
    tier.check()
    tier.begin_step(9)
    assert tier.put(b"a") == 0
    tier.check()


def test_a_private_entry_not_read_frees_its_slot_at_once() -> None:
    tier = tier_with((7, 0), size=1)
    tier.discard((7, 0))
    tier.discard((7, 1))
    assert tier.put(b"a") == 0


def test_only_hashes_are_published() -> None:
    deltas = KVDeltas(enabled=True)
    tier = HostTier(2, deltas=deltas)
    tier.begin_step(1)
    tier.put((7, 0))
    tier.put(BLOCK_A)
    assert deltas.drain().stored == [("host", BLOCK_A)]
    assert [*tier.cached_hashes()] == [BLOCK_A]
    assert [*tier.private_keys()] == [(7, 0)]
    tier.forget_all()
    assert deltas.drain().removed == [("host", BLOCK_A)]
    assert tier.num_used == 0
    tier.check()


def test_a_delta_that_is_not_drained_cancels_out() -> None:
    deltas = KVDeltas(enabled=True)
    for _ in range(1000):
        deltas.stored("device", BLOCK_A)
        deltas.removed("device", BLOCK_A)
    deltas.stored("device", BLOCK_B)
    delta = deltas.drain()
    assert (delta.stored, delta.removed) == ([("device", BLOCK_B)], [])


def test_disabled_deltas_record_nothing() -> None:
    deltas = KVDeltas(enabled=False)
    deltas.stored("device", BLOCK_A)
    assert not deltas.drain().stored
