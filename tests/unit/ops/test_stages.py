"""Stages exchange rows, also when a recording of a step is replayed, and the first one gets the rows that it needs."""

import numpy as np
import pytest
import torch
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.recording import Pool, record
from octavo_engine.ops.stages import Stages, planned_ranks
from octavo_testing.ranks import run_stages


def test_a_replayed_recording_exchanges_again_and_counts_bytes() -> None:
    def run(group: Group, stages: Stages) -> tuple[list[float], tuple[int, int]]:
        x, pool, found = torch.zeros(3), Pool(), []
        with record(pool, x) as recording:
            stages.send(x) if stages.is_first else stages.receive(x)
        assert recording.refused is None
        for value in (1.0, 5.0):
            x.fill_(value if stages.is_first else 0)
            recording.replay()
            found.append(x[2].item())
        return found, stages.take_bytes()

    assert run_stages([1, 1], 1, run) == [([1.0, 5.0], (36, 0)), ([1.0, 5.0], (0, 36))]


@pytest.mark.parametrize("rows", [[], [1], [0, 3], [0, 1, 2, 3]], ids=str)
def test_the_first_stage_gets_rows_of_the_last(rows: list[int]) -> None:
    def run(group: Group, stages: Stages) -> list[list[float]]:
        hidden = torch.full((4, 2), float(stages.index))
        return stages.return_rows(hidden, lambda: np.array(rows, dtype=np.int64)).tolist()

    first, second, third = run_stages([1, 1, 1], 1, run)
    assert first == [[2.0 if row in rows else 0.0] * 2 for row in range(4)]
    assert (second, third) == ([[1.0] * 2] * 4, [[2.0] * 2] * 4)


def test_a_stage_is_not_ahead_of_the_last_one_where_a_step_needs_no_rows() -> None:
    order: list[tuple[str, int]] = []

    def run(group: Group, stages: Stages) -> None:
        for step in range(20):
            if stages.is_last:
                order.append(("last begins", step))
            stages.return_rows(torch.empty(4, 2), lambda: np.array([], dtype=np.int64))
            if stages.is_first:
                order.append(("first ends", step))

    run_stages([1, 1], 1, run)
    assert all(order.index(("last begins", step)) < order.index(("first ends", step)) for step in range(20))


def test_ranks_are_numbered_by_stage_and_place() -> None:
    ranks = [planned_ranks(rank, 2, (3, 1, 2)) for rank in range(6)]
    assert [(stages.index, group.rank) for group, stages in ranks] == [(i, j) for i in range(3) for j in range(2)]
    assert [list(stages.share(6)) for _, stages in ranks[::2]] == [[0, 1, 2], [3], [4, 5]]
    group, stages = planned_ranks(1, 2, ())
    assert (group.rank, group.size, stages.size, stages.share(4)) == (1, 2, 1, range(4))
