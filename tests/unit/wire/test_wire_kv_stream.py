import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.wire.kv_stream import KVChange, KVSet, numbers, roll, run_together

hashes = st.sets(st.integers(0, 2**64 - 1), max_size=8)


def test_a_hash_is_sent_as_its_first_eight_bytes_little_endian():
    assert numbers(bytes.fromhex("0100000000000000ff00000000000080")) == (1, 0x80000000000000FF)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_hashes_survive_concatenation_and_splitting(values):
    assert numbers(run_together(values)) == tuple(values)


def test_a_part_of_a_hash_is_refused():
    with pytest.raises(ValueError, match="9 bytes are not a multiple of 8"):
        numbers(b"123456789")


def test_the_digest_is_as_documented():
    assert roll(0, "device", [1, 2]) == 3
    assert roll(3, "host", [0x0000_0001_0000_0002]) == 3 ^ 0x0000_0002_0000_0001


@given(device=hashes, host=hashes)
def test_an_emptied_set_has_the_digest_of_an_empty_set(device, host):
    come = roll(roll(0, "host", host), "device", device)
    assert roll(roll(come, "device", device), "host", host) == 0


@given(first=hashes, second=hashes)
def test_stored_and_removed_hashes_are_applied_exactly(first, second):
    kept = KVSet()
    kept.apply(KVChange(stored=run_together(first), host_stored=run_together(second), digest=_digest(first, second)))
    gone = KVChange(removed=run_together(first), host_removed=run_together(second), digest=0)
    assert (kept.device, kept.host, kept.is_exact) == (first, second, True)
    kept.apply(gone)
    assert (kept.device, kept.host, kept.is_exact) == (set(), set(), True)


@pytest.mark.parametrize("wrong", ["lost", "repeated", "reordered", "other tier"])
def test_a_lost_repeated_or_reordered_change_is_detected(wrong):
    changes = [
        KVChange(stored=run_together([1, 2]), digest=3),
        KVChange(stored=run_together([4]), removed=run_together([1]), digest=6),
    ]
    kept = KVSet()
    if wrong == "lost":
        del changes[0]
    elif wrong == "repeated":
        changes.append(changes[1])
    elif wrong == "reordered":
        changes.reverse()
    else:
        changes[1] = KVChange(host_stored=run_together([4]), removed=run_together([1]), digest=6)
    for change in changes:
        kept.apply(change)
    assert not kept.is_exact


def _digest(device, host):
    return roll(roll(0, "device", device), "host", host)
