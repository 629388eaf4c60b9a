"""Recordings of kernel calls: memory from the pool, and operators of torch that prevent a replay."""

import ctypes
from collections.abc import Callable
from threading import Thread

import numpy as np
import pytest
import torch
from octavo_engine.ops.gather import gather_rows
from octavo_engine.ops.native_library import KERNEL_ARGUMENTS, native_library
from octavo_engine.ops.recording import Recording, WaitWatch, record, recordable
from octavo_engine.ops.recording_pool import Pool
from octavo_engine.ops.rope import rotate_
from torch import Tensor
from torch.nn import functional as F


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


def with_change(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(x)
    return x


#: What operators of torch compute from 8 values.
COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: x * 1.0,
    "dtype": lambda x: x.to(torch.bfloat16),
    "strided": lambda x: x.view(2, 4).t() * 2,
    "several-results": lambda x: x.topk(3).values.sort().values[1:],
    "list": lambda x: torch.cat([x, x[:3] + 1]),
    "index": lambda x: x[(x[:2] * 0).long()],
    "in-place": lambda x: (x * 2).add_(x).clamp_(max=9),
    "out": lambda x: torch.add(x, x, out=torch.empty(8)),
    "zeros": lambda x: torch.zeros(2, 3).index_add_(0, torch.arange(2), x[:6].view(2, 3)),
    "filled": lambda x: torch.empty(3).fill_(2.0) + x[0],
    "constant": lambda x: torch.tensor([1.0, 2.0]).mul(x[:2]),
    "weight": lambda x: F.linear(x[None, :2], WEIGHT.view(3, 2)),
    "mask": lambda x: x.masked_fill(x > 3, 0.0),
    "turned": lambda x: (x.view(2, 4) + 1).t_() * 2,
    "partly-complex": lambda x: torch.view_as_complex(x.view(4, 2)).mul(1j).real.contiguous(),
    "empty-part": lambda x: torch.cat([x.view(2, 4) * 2, (x.view(2, 4) + 1)[:, 4:]], -1),
    "empty-result": lambda x: torch.cat([x, x[8:] * 2]),
    "overlapping": lambda x: x[:1].expand(3) + x[:3],
    "view-changed": lambda x: with_change(x + 1, lambda y: y.view(2, 4)[0].zero_()) * 2,
    "item-set": lambda x: with_change(x * 2, lambda y: y.__setitem__(torch.tensor([1, 2]), x[:2])) + 1,
    "numbers": lambda x: -(torch.sub(x, 1.5, alpha=2) * 3 + torch.tensor(0.5)) + (x.long() - 2),
    "no-dropout": lambda x: F.dropout(x + 1, 0.5, training=False),
}
#: Operators that a replay could not repeat.
OTHERS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "input": ("aten.add_.Tensor", lambda x: x.add_(1)),
    "list": ("Tensor.tolist", lambda x: (x + 1).tolist()),
    "array": ("Tensor.numpy", lambda x: (x + 1).numpy()),
    "array-protocol": ("Tensor.__array__", lambda x: np.asarray(x)),
    "value": ("aten._local_scalar_dense.default", lambda x: x[0].item()),
    "branch": ("aten._local_scalar_dense.default", lambda x: 1 if x[0] > 1 else 2),
    "comparison": ("aten.equal.default", lambda x: x.equal(x)),
    "nonzero": ("aten.nonzero.default", lambda x: x.nonzero()),
    "where": ("aten.nonzero.default", lambda x: torch.where(x > 2)),
    "masked": ("aten.index.Tensor", lambda x: x[x > 2]),
    "masked-set": ("aten.index_put_.default", lambda x: with_change(x + 1, lambda y: y.__setitem__(y > 2, x[2:]))),
    "conjugate": ("aten.clone.default", lambda x: torch.view_as_complex(x.view(4, 2)).conj().clone()),
    "negative": ("aten.clone.default", lambda x: torch._neg_view(x).clone()),
    "counts": ("aten.bincount.default", lambda x: x.long().bincount()),
    "random": ("aten.rand.default", lambda x: torch.rand(3)),
    "random-in-place": ("aten.bernoulli_.float", lambda x: torch.empty(3).bernoulli_(0.5)),
    "other-memory": ("aten.view.default", lambda x: UNKNOWN.view(2, 1)),
    "index": ("aten.index.Tensor", lambda x: x[INDEX]),
    "set": ("aten.set_.source_Tensor", lambda x: torch.empty(3).set_(UNKNOWN)),
    "resized": ("aten.add.out", lambda x: torch.add(x, x, out=torch.empty(0))),
    "new-statistics": (
        "aten._native_batch_norm_legit.default",
        lambda x: torch.native_batch_norm(x.view(2, 4), None, None, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5),
    ),
    "layout": ("aten.to_mkldnn.default", lambda x: x.to_mkldnn()),
}
UNKNOWN, INDEX, WEIGHT = torch.ones(2), torch.tensor([1, 3]), torch.arange(6.0)


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_operators_are_repeated_over_other_values(name: str, has_gradients: bool) -> None:
    """The first results have been released, and their memory overwritten; only that of the last one is read again."""
    x, pool = torch.arange(8.0), Pool()
    with torch.inference_mode(not has_gradients):
        with record(pool, x, WEIGHT) as recording:
            found = COMPUTED[name](x)
        assert recording.refused is None
        assert found.equal(COMPUTED[name](x))
        x.copy_(torch.tensor([5.0, 3.0, 7.0, 1.0, 2.5, 0.5, 6.0, 4.0]))
        pool.fill(0xFF)
        recording.replay()
        want = COMPUTED[name](x)
    assert found.equal(want)
    assert found.stride() == want.stride()


def test_operators_and_kernels_keep_their_order_and_reuse_memory() -> None:
    x, pool, seen = torch.ones(1000), Pool(), list[float]()
    look = recordable(lambda address: seen.append(ctypes.c_float.from_address(address).value))
    with record(pool, x) as recording:
        y = x
        for _ in range(20):
            y = y * 2
            look(y.data_ptr())
    assert recording.num_operators == 20
    assert pool.used_bytes < 3 * 4096
    x.fill_(3.0)
    recording.replay()
    assert seen == [2.0**i for i in range(1, 21)] + [3 * 2.0**i for i in range(1, 21)]


@pytest.mark.parametrize("name", VIEWS)
@torch.inference_mode()
def test_views_may_be_replayed(name: str) -> None:
    x = torch.arange(8.0)
    with record(Pool(), x) as recording:
        VIEWS[name](x)
    assert recording.refused is None


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_operators_that_cannot_be_repeated_are_named(name: str, has_gradients: bool) -> None:
    operator, work = OTHERS[name]
    x = torch.arange(8.0)
    with torch.inference_mode(not has_gradients), record(Pool(), x) as recording:
        work(x)
    assert recording.refused == operator


@pytest.mark.parametrize(
    ("operator", "work"),
    [
        ("aten.nonzero.default", lambda x: torch.where(x > 2)),
        ("aten._to_copy.default", lambda x: x.to("meta")),
        ("aten.copy_.default", lambda x: x.new_empty(8, device="meta").copy_(x, non_blocking=True)),
        (None, lambda x: x.to(torch.bfloat16).copy_(x + 1)),
    ],
    ids=["values", "copy", "copy-in-place", "none"],
)
@torch.inference_mode()
def test_an_operator_for_which_the_host_waits_is_named(operator: str | None, work: Callable[[Tensor], object]) -> None:
    """The meta device stands for a GPU."""
    with WaitWatch() as watch:
        work(torch.arange(8.0))
    assert watch.operator == operator
