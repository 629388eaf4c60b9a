"""Collective operations of ranks, which are threads here, and the division of things among them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from octavo_engine.ops.message_store import MessageStore
from octavo_engine.ops.rank_group import Group, open_group
from octavo_engine.ops.recording import Pool, record
from octavo_engine.wire.errors import EngineDead, GroupBroken, StartupError
from octavo_testing.ranks import TIMEOUT, make_stores, run_ranks
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_ranks_get_the_sum(dtype: torch.dtype) -> None:
    def run(group: Group) -> Tensor:
        return group.all_reduce(torch.full((2, 3), 1.5 + group.rank, dtype=dtype))

    for found in run_ranks(3, run):
        assert torch.equal(found, torch.full((2, 3), 7.5, dtype=dtype))


def test_ranks_without_a_loopback_interface_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_device(hostname: str) -> None:
        raise RuntimeError(f"enforce fail at device.cc:84\nUnable to find interface for: {hostname}")

    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "create_device", create_device)  # type: ignore[attr-defined]
    with pytest.raises(StartupError, match=r"loopback interface lo.*ip link set lo up") as failure:
        run_ranks(2, lambda group: None)
    assert "\n" not in str(failure.value)


def test_groups_of_some_ranks_have_names() -> None:
    """Ranks 0 and 1, and 1 and 2, connect by the entries of all three, of which each rank gets every one."""
    stores = make_stores(3)
    members = {"left": [0, 1], "right": [1, 2]}

    def run(rank: int) -> dict[str, float]:
        found = {}
        for name, ranks in members.items():
            if rank in ranks:
                group = open_group(stores[rank], ranks.index(rank), 2, TIMEOUT, TIMEOUT, name=name)
                found[name] = group.all_reduce(torch.tensor([1.0 + rank])).item()
        return found

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [{"left": 3.0}, {"left": 3.0, "right": 5.0}, {"right": 5.0}]


def test_a_stranger_in_the_place_of_a_rank_is_an_error_of_the_start() -> None:
    """The number that comes over gloo is not the one that rank 1 has sent in the store."""
    stores = make_stores(2)
    send = stores[1]._send
    stores[1]._send = lambda key, value: send(key, b"x" * 16 if "number" in key else value)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(open_group, stores[rank], rank, 2, TIMEOUT, TIMEOUT) for rank in range(2)]
        with pytest.raises(GroupBroken, match="a process that is not rank 1 has connected in its place"):
            found[0].result()
        found[1].result()


@pytest.mark.parametrize("error", [TimeoutError("another rank is late"), GroupBroken("another rank has failed")])
def test_a_rank_that_does_not_connect_is_an_error_of_the_start(error: Exception) -> None:
    def receive(timeout_s: float) -> tuple[str, bytes]:
        raise error

    with pytest.raises(GroupBroken, match=str(error)):
        open_group(MessageStore(lambda key, value: None, receive, TIMEOUT), 0, 2, TIMEOUT, TIMEOUT)


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
