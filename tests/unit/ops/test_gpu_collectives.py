"""Operations on a GPU's tensors, with a stand-in for NCCL: the host waits for them, and only then sees a lost rank."""

import os
from datetime import timedelta

import pytest
import torch
from octavo_engine.ops.rank_group import Group, find_interface
from octavo_engine.wire.errors import GroupBroken
from octavo_testing.late_nccl import late_nccl
from octavo_testing.ranks import run_ranks
from torch import Tensor

GPU = torch.device("cpu")  # stands for it


def test_ranks_add_up_gather_and_broadcast() -> None:
    def run(group: Group) -> tuple[Tensor, list[Tensor], Tensor]:
        total = group.all_reduce(torch.full((2, 3), 1.5 + group.rank))
        parts = group.gather(torch.tensor([[group.rank, 7], [1, 2]]).T)
        group.wait()
        return total, parts, group.broadcast(torch.tensor([10 + group.rank]))

    with late_nccl():
        found = run_ranks(3, run, gpu=GPU)
    for total, _, sent in found:
        assert torch.equal(total, torch.full((2, 3), 7.5))
        assert sent.tolist() == [10]
    assert [len(parts) for _, parts, _ in found] == [3, 0, 0]
    assert [part.tolist() for part in found[0][1]] == [[[rank, 1], [7, 2]] for rank in range(3)]


def test_torch_must_not_end_the_process_when_an_operation_is_late() -> None:
    with late_nccl():
        run_ranks(2, lambda group: group.wait(), gpu=GPU)
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7", "the user's choice stays"


@pytest.mark.parametrize("operation", ["wait", "gather"])
def test_a_lost_rank_is_an_error_of_the_next_wait(operation: str) -> None:
    """The all-reduce itself is queued behind other work of the GPU."""

    def run(group: Group) -> str:
        assert group._gpus is not None
        group._gpus._nccl.is_stuck = True
        group.all_reduce(torch.zeros(1))
        with pytest.raises(GroupBroken) as caught:
            group.wait() if operation == "wait" else group.gather(torch.zeros(1))
        return str(caught.value)

    with late_nccl():
        found = run_ranks(2, run, gpu=GPU)
    name = "all-reduce" if operation == "wait" else "gather"
    for rank, text in enumerate(found):
        assert text.startswith(f"rank {rank} of 2: the {name} of the ranks failed: ")
        assert "timeout" in text


def test_a_group_without_gpus_has_nothing_to_wait_for_or_to_end() -> None:
    Group().wait()
    Group().abort()


def test_operations_that_are_ended_have_no_results() -> None:
    """The end of an operation ends the wait for it without an error."""

    def run(group: Group) -> None:
        group.all_reduce(torch.zeros(1))
        group.abort()
        for wait in (group.wait, lambda: group.gather(torch.zeros(1))):
            with pytest.raises(GroupBroken, match="another rank is gone"):
                wait()

    with late_nccl() as groups:
        run_ranks(2, run, gpu=GPU)
        assert [each.is_aborted for each in groups] == [True, True]


def test_a_rank_that_does_not_come_is_an_error_of_the_start() -> None:
    """Rank 1 connects by gloo, and ends before NCCL connects."""

    def run(group: Group) -> None:
        raise AssertionError("the group is not complete")

    with late_nccl() as groups, pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo_testing.late_nccl.LateWork.synchronize", lambda work: None)
        with pytest.raises(GroupBroken, match="NCCL adds 2 ones up to 1"):
            run_ranks(2, run, timedelta(seconds=5), gpu=GPU)
    assert len(groups) == 2


def test_nccl_takes_the_interface_of_the_host_s_address() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("192.0.2.1") is None
