"""Recordings of kernel calls: memory from the pool, and operators of torch that prevent a replay."""

import ctypes
from collections.abc import Callable
from threading import Thread

import numpy as np
import pytest
import torch
from octavo_engine.ops.gather import gather_rows
from octavo_engine.ops.native_library import KERNEL_ARGUMENTS, native_library
from octavo_engine.ops.recording import Pool, Recording, record, recordable
from octavo_engine.ops.rope import rotate_
from torch import Tensor


def test_pieces_return_when_their_last_view_is_gone() -> None:
    pool = Pool()
    first = pool.empty((3, 5), torch.bfloat16)
    view, address = first[1:], first.data_ptr()
    del first
    second = pool.empty((3, 5), torch.bfloat16)
    assert second.data_ptr() != address
    del view
    assert pool.empty((15,), torch.bfloat16).data_ptr() == address
    assert pool.empty((33,), torch.float32).data_ptr() > second.data_ptr()  # the gap is too small


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    pool = Pool()
    tensors = [pool.empty((size,), torch.uint8).fill_(size % 251) for size in (1, 64, 0, 65, 1000, 70 << 20, 0, 3)]
    assert all(x.data_ptr() % 64 == 0 for x in tensors)
    assert all((x == len(x) % 251).all() for x in tensors)


def test_an_output_is_made_again_without_its_piece() -> None:
    pool = Pool()
    x = pool.empty((4, 4), torch.float32).fill_(7.0)
    locate = pool.locate(x[1:])
    assert locate is not None
    alias = locate()
    assert alias.equal(x[1:])
    address = x.data_ptr()
    del x
    assert pool.empty((16,), torch.float32).fill_(3.0).data_ptr() == address
    assert (alias == 3.0).all()
    assert pool.locate(torch.zeros(3)) is None
    assert pool.locate(alias.t()) is None


def test_a_replay_repeats_the_calls() -> None:
    def double(source: int, target: int, count: int) -> None:
        torch_free(target, count)[:] = torch_free(source, count) * 2

    def torch_free(address: int, count: int) -> np.ndarray:
        return memory[address : address + count]

    memory, kernel = np.ones(8), recordable(double)
    kernel(0, 4, 2)
    with record(Pool()) as recording:
        kernel(0, 2, 2)
        kernel(2, 4, 2)
    memory[:2] = 5
    kernel(0, 6, 2)
    recording.replay()
    assert memory.tolist() == [5, 5, 10, 10, 20, 20, 10, 10]


def test_many_calls_are_replayed_in_order() -> None:
    made: list[int] = []
    kernel = recordable(made.append)
    with record(Pool()) as recording:
        for i in range(100):
            kernel(i)
    recording.replay()
    assert made == [*range(100), *range(100)]


NATIVE = pytest.mark.skipif(native_library() is None, reason="the kernels are not available")


@NATIVE
@pytest.mark.parametrize("count", [1, 3, 5000], ids=["one", "three", "several-arrays"])
def test_native_calls_are_replayed_with_all_their_arguments(count: int) -> None:
    """Each gather has a float between its numbers and reads what the one before it wrote."""
    table, ids, pool = torch.ones(1, 5), torch.zeros(1, dtype=torch.int64), Pool()
    with record(pool, table, ids) as recording:
        x = table
        for at in range(count):
            x = gather_rows(x, ids, 0.5 if at % 1000 == 0 else 1.0)
    assert recording.refused is None
    want = x.clone()
    table += 2
    recording.replay()
    assert x.equal(want * 3)
    assert want.unique().tolist() == [0.5 ** -(-count // 1000)]


@NATIVE
def test_calls_with_the_most_arguments_are_replayed() -> None:
    assert max(map(len, KERNEL_ARGUMENTS.values())) == len(KERNEL_ARGUMENTS["octavo_rotate"])
    x, cos, sin = torch.arange(8.0).view(2, 1, 4), torch.full((2, 1, 4), -1.0), torch.zeros(2, 1, 4)
    with record(Pool(), x, cos, sin) as recording:
        rotate_(x, cos, sin)
    assert x.flatten().tolist() == [-i for i in range(8)]
    recording.replay()
    assert x.flatten().tolist() == [*range(8)]


@NATIVE
def test_native_and_other_calls_keep_their_order() -> None:
    table, ids, seen = torch.ones(1, 3), torch.zeros(1, dtype=torch.int64), list[float]()
    look = recordable(lambda address: seen.append(ctypes.c_float.from_address(address).value))
    with record(Pool(), table, ids) as recording:
        once = gather_rows(table, ids, 2.0)
        look(once.data_ptr())
        twice = gather_rows(once, ids, 2.0)
        look(twice.data_ptr())
    table *= 10
    recording.replay()
    assert seen == [2, 4, 20, 40]


@pytest.mark.parametrize("name", KERNEL_ARGUMENTS)
def test_a_recorded_call_has_room_for_the_arguments_of_each_kernel(name: str) -> None:
    numbers = [kind for kind in KERNEL_ARGUMENTS[name] if kind is not ctypes.c_float]
    assert len(numbers) <= 11
    assert len(KERNEL_ARGUMENTS[name]) - len(numbers) <= 1


def test_calls_of_other_threads_are_not_recorded() -> None:
    made: list[int] = []
    kernel = recordable(made.append)
    with record(Pool()) as recording:
        other = Thread(target=kernel, args=(1,))
        other.start()
        other.join()
    recording.replay()
    assert made == [1]


def test_an_error_ends_the_recording() -> None:
    made: list[int] = []
    kernel = recordable(made.append)

    def fail() -> None:
        with record(Pool()) as recording:
            recordings.append(recording)
            raise RuntimeError("broken")

    recordings: list[Recording] = []
    with pytest.raises(RuntimeError, match="broken"):
        fail()
    kernel(1)
    recordings[0].replay()
    assert made == [1]
    assert torch.ones(2).mul(2).tolist() == [2, 2]


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "view": lambda x: x.view(-1, 2, 2).split_with_sizes((1, 1), 1),
    "empty": lambda x: torch.empty((3, len(x)), dtype=torch.bfloat16)[1:].unbind(0),
    "no-op": lambda x: x.to(torch.float32).contiguous().flatten(),
    "slice": lambda x: x[2:, None].transpose(0, 1),
}
OTHERS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "copy": ("aten.mul.Tensor", lambda x: x * 1.0),
    "in-place": ("aten.add_.Tensor", lambda x: x.add_(1)),
    "out": ("aten.add.out", lambda x: torch.add(x, x, out=torch.empty(8))),
    "zeros": ("aten.zeros.default", lambda x: torch.zeros(3)),
    "filled": ("aten.fill_.Scalar", lambda x: torch.empty(3).fill_(0.0)),
    "constant": ("aten.lift_fresh.default", lambda x: torch.tensor([1.0])),
    "value": ("aten._local_scalar_dense.default", lambda x: x[0].item()),
    "other-memory": ("aten.view.default", lambda x: UNKNOWN.view(2, 1)),
    "dtype": ("aten._to_copy.default", lambda x: x.to(torch.bfloat16)),
    "index": ("aten.index.Tensor", lambda x: x[INDEX]),
    "set": ("aten.set_.source_Tensor", lambda x: torch.empty(3).set_(UNKNOWN)),
}
UNKNOWN, INDEX = torch.ones(2), torch.tensor([1, 3])


@pytest.mark.parametrize("name", VIEWS)
@torch.inference_mode()
def test_views_may_be_replayed(name: str) -> None:
    x = torch.arange(8.0)
    with record(Pool(), x) as recording:
        VIEWS[name](x)
    assert recording.refused is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_are_named(name: str) -> None:
    operator, work = OTHERS[name]
    x = torch.arange(8.0)
    with record(Pool(), x) as recording:
        work(x)
    assert recording.refused == operator


@pytest.mark.parametrize("name", OTHERS)
@torch.inference_mode()
def test_other_operators_are_refused_without_gradients(name: str) -> None:
    x = torch.arange(8.0)
    with record(Pool(), x) as recording:
        OTHERS[name][1](x)
    assert recording.refused is not None
