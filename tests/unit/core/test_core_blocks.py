"""`BlockPool`: references, prefix cache lookups and the order of eviction."""

import pytest
from octavo_engine.core.blocks import BlockPool
from octavo_engine.core.events import KVDeltas

A, B = b"a" * 32, b"b" * 32


def test_released_blocks_are_cached_if_they_have_a_hash_else_free() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks[0], A)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_in_use) == (3, 1, 0)
    assert pool.find(A) == blocks[0]
    pool.check()


def test_the_tail_of_a_finished_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, block_hash in zip(blocks, (b"0", b"1", b"2"), strict=True):
        pool.register(block, block_hash)
    pool.release(blocks)
    assert pool.allocate(2) == [blocks[2], blocks[1]]
    assert pool.find(b"0") == blocks[0]
    assert pool.find(b"1") is pool.find(b"2") is None
    pool.check()


def test_free_blocks_are_allocated_before_cached_blocks() -> None:
    pool = BlockPool(3)
    old, new = pool.allocate(2)
    pool.register(old, A)
    pool.release([old])
    pool.release([new])
    pool.allocate(2)
    assert pool.find(A) == old
    assert pool.num_evicted == 0


def test_sharing_removes_a_cached_block_from_the_middle_of_the_list() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(5)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.release(blocks)
    pool.share([blocks[2]])
    pool.check()
    assert pool.num_cached == 4
    assert blocks[2] not in pool.allocate(4)
    pool.check()


def test_a_duplicate_is_found_when_the_first_block_is_evicted() -> None:
    deltas = KVDeltas(enabled=True)
    pool = BlockPool(2, deltas=deltas)
    first, second = pool.allocate(2)
    pool.register(first, A)
    pool.register(second, A)
    assert deltas.drain().stored == [("device", A)]
    pool.release([first])
    pool.allocate(1)
    pool.check()
    assert pool.find(A) == second
    assert not deltas.drain().removed, "the hash is still there"
    pool.release([second])
    pool.allocate(1)
    assert pool.find(A) is None
    assert deltas.drain().removed == [("device", A)]


def test_an_evicted_duplicate_leaves_the_first_block_registered() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, A)
    pool.release([blocks[2]])
    pool.allocate(1)
    pool.check()
    assert pool.find(A) == blocks[0]


@pytest.mark.parametrize("spill", [True, False, None])
def test_eviction_reports_only_blocks_released_with_spill(spill: bool | None) -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = BlockPool(1, evicted=lambda block, block_hash: evicted.append((block, block_hash)))
    block = pool.allocate(1)
    pool.register(block[0], A)
    pool.release(block)
    pool.share(block)
    pool.release(block, spill=spill)
    pool.allocate(1)
    assert evicted == ([] if spill is False else [(0, A)]), "None keeps the earlier value"


def test_forgetting_hashes_frees_cached_blocks_and_keeps_used_blocks() -> None:
    pool = BlockPool(3)
    kept, cached = pool.allocate(2)
    pool.register(kept, A)
    pool.register(cached, B)
    pool.release([cached])
    pool.forget_hashes()
    assert (pool.num_free, pool.num_cached, pool.num_in_use) == (2, 0, 1)
    assert pool.find(A) is pool.find(B) is None
    pool.check()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.allocate(3),
        lambda pool: pool.release([0]),
        lambda pool: pool.share([0]),
        lambda pool: pool.register(0, A),
        lambda pool: pool.unregister(pool.allocate(1)[0]),
        lambda pool: [pool.register(b, h) for b, h in zip(pool.allocate(1) * 2, (A, B), strict=True)],
    ],
    ids=["too many", "release free", "share free", "register free", "unregister without", "two hashes"],
)
def test_misuse_raises_an_assertion_error(misuse: object) -> None:
    with pytest.raises(AssertionError):
        misuse(BlockPool(2))  # type: ignore[operator]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.refs.__setitem__(0, 5),
        lambda pool: setattr(pool, "num_cached", 2),
        lambda pool: setattr(pool, "num_available", 1),
        lambda pool: pool.hashes.__setitem__(1, None),
        lambda pool: pool._by_hash.clear(),
    ],
)
def test_check_detects_damage(damage: object) -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.register(blocks[1], A)
    pool.release(blocks)
    pool.check()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check()
