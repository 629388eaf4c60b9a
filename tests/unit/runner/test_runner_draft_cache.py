"""The tokens that have KV of the draft model, through steps without drafts, copies, swaps and prefix hits."""

from typing import cast

import numpy as np
import pytest
import torch
from octavo_engine.ops.attention import AttentionBackend
from octavo_engine.runner.drafter import DraftCache, Table
from octavo_engine.wire.plan import StepPlan

BLOCK = 4


class Blocks:
    """Stands for an attention backend; records the calls that move blocks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[int, int]]]] = []

    def allocate(self, num_blocks: int) -> None: ...

    def release(self) -> None: ...

    def swap_out(self, pairs: list[tuple[int, int]], host: torch.Tensor) -> None:
        self.calls.append(("out", pairs))

    def swap_in(self, pairs: list[tuple[int, int]], host: torch.Tensor) -> None:
        self.calls.append(("in", pairs))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.calls.append(("copy", pairs))


def table(*blocks: int) -> Table:
    return np.array(blocks, dtype=np.int32)


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def cache(blocks: Blocks) -> DraftCache:
    backend = cast("AttentionBackend", blocks)
    return DraftCache(backend, block_size=BLOCK, num_blocks=8, make_host=lambda: torch.zeros(4, 1))


def step_without_drafts(cache: DraftCache, block: int, position: int) -> None:
    cache.forget(np.array([block]), np.array([position % BLOCK]))


def test_a_new_sequence_lacks_everything(cache: DraftCache) -> None:
    assert cache.find_missing(table(3, 5), 0) == 0
    assert cache.find_missing(table(3, 5), 7) == 0


@pytest.mark.parametrize("end", range(1, 13))
def test_tokens_that_were_computed_are_there(cache: DraftCache, end: int) -> None:
    cache.fill(table(3, 5, 1), 0, end, end)
    for length in range(1, 13):
        assert cache.find_missing(table(3, 5, 1), length) == min(length, end)


def test_a_chunk_without_room_is_missing_from_there_on(cache: DraftCache) -> None:
    cache.fill(table(3, 5, 1), 0, 12, 12)  # of an earlier owner of the blocks
    cache.fill(table(3, 5, 1), 0, 6, 12)
    assert cache.find_missing(table(3, 5, 1), 12) == 6


def test_steps_without_drafts_leave_a_gap_that_a_later_pass_fills(cache: DraftCache) -> None:
    cache.fill(table(3, 5, 1), 0, 6, 6)
    for position in range(6, 11):
        step_without_drafts(cache, [3, 5, 1][position // BLOCK], position)
    assert cache.find_missing(table(3, 5, 1), 11) == 6
    cache.fill(table(3, 5, 1), 6, 11, 11)
    assert cache.find_missing(table(3, 5, 1), 11) == 11


def test_a_block_with_a_new_owner_has_nothing(cache: DraftCache) -> None:
    cache.fill(table(3, 5), 0, 8, 8)
    step_without_drafts(cache, 5, 0)
    assert cache.find_missing(table(3, 5), 8) == 4
    assert cache.find_missing(table(3, 6), 8) == 4, "another block after a prefix that is there"


def test_rejected_drafts_are_forgotten(cache: DraftCache) -> None:
    cache.fill(table(3), 0, 3, 3)
    step_without_drafts(cache, 3, 1)
    assert cache.find_missing(table(3), 3) == 1


def test_copies_and_swaps_keep_what_is_there(cache: DraftCache, blocks: Blocks) -> None:
    cache.fill(table(3, 5), 0, 6, 6)
    cache.copy_blocks([(5, 2)])
    assert cache.find_missing(table(3, 2), 7) == 6
    cache.swap_blocks(StepPlan(step_id=1, swap_out=[(3, 1), (2, 0)]))
    step_without_drafts(cache, 3, 0)
    step_without_drafts(cache, 2, 0)
    assert cache.find_missing(table(3, 2), 7) == 0
    cache.swap_blocks(StepPlan(step_id=2, swap_in=[(1, 7), (0, 4)]))
    assert cache.find_missing(table(7, 4), 7) == 6
    assert blocks.calls == [("copy", [(5, 2)]), ("out", [(3, 1), (2, 0)]), ("in", [(1, 7), (0, 4)])]


def test_memory_that_was_given_back_holds_nothing(cache: DraftCache) -> None:
    cache.fill(table(3), 0, 4, 4)
    cache.release()
    cache.allocate()
    assert cache.find_missing(table(3), 4) == 0
