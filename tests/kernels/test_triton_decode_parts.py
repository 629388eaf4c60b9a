"""Decode attention by parts of keys: which parts a sequence has, their results, and how many programs share them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo_engine.ops import cuda_backend
from octavo_engine.ops.attention import AttentionBatch
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.reference import ReferenceBackend
from octavo_engine.ops.triton.decode_attention import Processor, list_parts
from octavo_testing.attention_cases import (
    SeqShape,
    make_batch,
    make_spec,
    part_of,
    random_qkv,
    run_history_and_step,
)

#: Parts by length and window.
PARTS = {
    (0, None): 0,
    (1, None): 1,
    (127, None): 1,
    (128, None): 1,
    (129, None): 2,
    (1024, None): 8,
    (2047, None): 16,
    (2048, None): 16,
    (2049, None): 5,
    (5000, None): 10,
    (50, 100): 1,
    (128, 100): 1,
    (129, 100): 2,
    (256, 100): 1,
    (5000, 100): 2,
    (2048, 2048): 16,
    (2049, 2048): 17,
    (5000, 2048): 17,
    (2049, 2049): 5,
    (5000, 2049): 5,
    (5120, 2049): 5,
}
WINDOWS = [None, 100, 2048, 2049]


def step_of(lengths: list[int], num_queries: list[int]) -> AttentionBatch:
    starts = torch.tensor([0, *num_queries]).cumsum(0).to(torch.int32)
    seq_lens, tables = torch.tensor(lengths, dtype=torch.int32), torch.zeros(len(lengths), 1, dtype=torch.int32)
    empty = make_batch([SeqShape(0, 1)], 16)[0]
    return replace(empty, query_start=starts, seq_lens=seq_lens, block_tables=tables, num_keys=sum(lengths))


@pytest.mark.parametrize("window", WINDOWS)
def test_parts_that_a_query_sees_are_listed(window: int | None) -> None:
    wanted = {length: parts for (length, own), parts in PARTS.items() if own == window}
    batch = step_of([*wanted, 700, 700], [1] * len(wanted) + [2, 0])
    assert list_parts(batch, window).starts.diff().tolist() == [*wanted.values(), 0, 0]


def test_parts_of_many_sequences_follow_each_other() -> None:
    lengths = [1 + 37 * seq % 300 for seq in range(1500)]
    starts = list_parts(step_of(lengths, [1] * 1500), None).starts
    assert starts.tolist() == [0, *torch.tensor([-(-length // 128) for length in lengths]).cumsum(0).tolist()]


@pytest.mark.parametrize("window", [*WINDOWS, 1, 700, 3000])
def test_the_bound_of_parts_holds(window: int | None) -> None:
    """The bound sizes the memory of partial results."""
    rows = torch.randint(1, 6000, (20, 40), generator=torch.Generator().manual_seed(2))
    rows[::2] %= 300
    for lengths in (*rows.tolist(), *([length] * 40 for length in (1, 128, 129, 1921, 2048, 2049, 2050, 4097))):
        parts = list_parts(step_of(lengths, [1] * 40), window)
        assert parts.starts[-1] <= parts.most, lengths


@pytest.mark.parametrize(
    ("window", "lengths"),
    [
        (None, (127, 128, 129, 2049)),
        (300, (129, 700, 2049)),
    ],
)
def test_attention_at_the_border_of_parts_equals_the_reference(window: int | None, lengths: tuple[int, ...]) -> None:
    spec = make_spec(heads=3, kv_heads=1, window=window)
    shapes = [SeqShape(length - 1, 1) for length in lengths]
    want = run_history_and_step(ReferenceBackend([spec.kv], 16, torch.float32), spec, shapes, 16, torch.float32)
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
    got = run_history_and_step(backend, spec, shapes, 16, torch.float32)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_the_bits_of_a_sequence_depend_on_no_other(window: int | None) -> None:
    spec = make_spec(heads=6, kv_heads=2, window=window)
    shapes = [SeqShape(n, q) for n, q in ((0, 1), (30, 4), (127, 1), (128, 1), (1100, 1), (2048, 1), (126, 3))]
    batch, num_blocks = make_batch(shapes, 16)
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
    backend.allocate(num_blocks)
    backend.caches[0].normal_(generator=torch.Generator().manual_seed(1))
    q, k, v = random_qkv(spec, len(batch.slots), torch.float32, seed=2)
    backend.begin_step(batch)
    crowded = backend.attend(spec, q, k, v, batch)
    for seq in range(len(shapes)):
        backend.num_programs = 1 + seq % 3
        part, rows = part_of(batch, [seq])
        backend.begin_step(part)
        assert torch.equal(backend.attend(spec, q[rows], k[rows], v[rows], part), crowded[rows])


SM_80, SM_89, SM_90 = Processor(164 << 10, 2048), Processor(100 << 10, 1536), Processor(228 << 10, 2048)


@pytest.mark.parametrize(
    ("processor", "registers", "shared_bytes", "num_warps", "programs"),
    [
        (SM_80, 153, 39168, 4, 3),  # heads of 128
        (SM_90, 117, 39168, 4, 4),
        (SM_89, 147, 39168, 4, 2),  # by shared memory
        (SM_90, 103, 42112, 8, 2),  # heads of 256
        (SM_89, 125, 42112, 8, 2),
        (SM_80, 96, 20736, 4, 5),  # heads of 64
        (SM_90, 80, 20736, 4, 6),
        (SM_90, 72, 20736, 4, 7),
        (SM_90, 73, 20736, 4, 6),  # 80, as registers are allocated
        (SM_80, 72, 41 << 10, 4, 3),
        (SM_80, 72, (41 << 10) - 1024, 4, 4),
        (SM_80, 16, 1024, 4, 16),  # by threads
        (SM_89, 16, 1024, 8, 6),
        (SM_89, 255, 99 << 10, 16, 1),
    ],
)
def test_programs_of_a_processor(
    processor: Processor, registers: int, shared_bytes: int, num_warps: int, programs: int
) -> None:
    assert processor.num_programs(registers, shared_bytes, num_warps) == programs


def test_the_compiled_kernel_decides_how_many_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def decode_attention(*arguments: Any, **_: Any) -> SimpleNamespace:
        launched.append(arguments[-1])
        registers, shared = (117, 39168) if arguments[1].kv.window is None else (142, 39168)
        return SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=shared, num_warps=4))

    monkeypatch.setattr(cuda_backend, "decode_attention", decode_attention)
    specs = [replace(make_spec(window=window), layer_idx=layer) for layer, window in enumerate((None, 24, None, 24))]
    backend = CudaBackend([spec.kv for spec in specs], 16, torch.float32, "cpu", num_programs=132, processor=SM_90)
    batch, num_blocks = make_batch([SeqShape(3, 1)], 16)
    backend.allocate(num_blocks)
    for _ in range(2):
        backend.begin_step(batch)
        for spec in specs:
            backend.attend(spec, *random_qkv(spec, 1, torch.float32, seed=0), batch)
    assert launched == [132, 132, 4 * 132, 3 * 132, *[4 * 132, 3 * 132] * 2]
