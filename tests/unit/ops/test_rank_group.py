"""Collective operations of ranks, which are threads here, and the division of things among them."""

import pytest
import torch
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.recording import Pool, record
from octavo_engine.wire.errors import EngineDead, StartupError
from octavo_testing.ranks import run_ranks
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_ranks_get_the_sum(dtype: torch.dtype) -> None:
    def run(group: Group) -> Tensor:
        return group.all_reduce(torch.full((2, 3), 1.5 + group.rank, dtype=dtype))

    for found in run_ranks(3, run):
        assert torch.equal(found, torch.full((2, 3), 7.5, dtype=dtype))


def test_ranks_without_a_loopback_interface_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_device(interface: str) -> None:
        raise RuntimeError(f"enforce fail at device.cc:84\nUnable to find address for: {interface}")

    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "create_device", create_device)  # type: ignore[attr-defined]
    with pytest.raises(StartupError, match=r"loopback interface lo.*ip link set lo up") as failure:
        run_ranks(2, lambda group: None)
    assert "\n" not in str(failure.value)


def test_rank_0_gathers_and_broadcasts() -> None:
    def run(group: Group) -> tuple[list[list[int]], list[int]]:
        gathered = group.gather(torch.tensor([group.rank, 7]))
        return [part.tolist() for part in gathered], group.broadcast(torch.tensor([10 + group.rank])).tolist()

    assert run_ranks(2, run) == [([[0, 7], [1, 7]], [10]), ([], [10])]


def test_a_group_of_one_returns_what_it_is_given() -> None:
    x = torch.tensor([1.0])
    assert Group().all_reduce(x) is x
    assert Group().broadcast(x) is x
    assert Group().gather(x) == [x]


def test_a_replayed_recording_adds_up_again() -> None:
    def run(group: Group) -> list[float]:
        pool = Pool()
        x = torch.zeros(4)
        with record(pool, x) as recording:
            group.all_reduce(x)
        assert recording.refused is None
        found = []
        for value in (1.0, 5.0):
            x.fill_(value + group.rank)
            recording.replay()
            found.append(x[0].item())
        return found

    assert run_ranks(2, run) == [[3.0, 11.0]] * 2


def test_a_rank_that_is_gone_is_an_error_of_the_others() -> None:
    """A rank closes its connections when its process group is deleted."""

    def run(group: Group) -> str:
        group.all_reduce(torch.zeros(1))  # rank 1 may be connected before rank 0 is
        if group.rank == 1:
            group._collectives = None
            return ""
        with pytest.raises(EngineDead) as caught:
            group.all_reduce(torch.zeros(1))
        return str(caught.value)

    assert run_ranks(2, run)[0].startswith("rank 0 of 2: the all-reduce of the ranks failed")


@pytest.mark.parametrize(
    ("count", "unit", "size", "expected"),
    [
        (3, 1, 2, [(0, 1), (1, 3)]),
        (8, 1, 3, [(0, 2), (2, 5), (5, 8)]),
        (259, 32, 2, [(0, 128), (128, 259)]),
        (40, 32, 1, [(0, 40)]),
    ],
)
def test_shares_are_whole_units(count: int, unit: int, size: int, expected: list[tuple[int, int]]) -> None:
    shares = Group(0, size).shares(count, unit)
    assert [(share.start, share.stop) for share in shares] == expected
    assert [Group(rank, size).share(count, unit) for rank in range(size)] == shares
