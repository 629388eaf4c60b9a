"""The Triton kernels, in the interpreter, against the reference: ragged mixes of prefill and decode.

The interpreter computes bfloat16 wrongly, so types are fp32 and fp16.
"""

from dataclasses import replace

import pytest
import torch
from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.reference import ReferenceBackend
from octavo_engine.ops.triton import key_tiles
from octavo_engine.ops.triton.paged_attention import tile_shape
from octavo_engine.ops.triton.write_kv import write_kv
from octavo_testing.attention_cases import (
    SeqShape,
    make_batch,
    make_spec,
    part_of,
    random_qkv,
    run_history_and_step,
)
from torch import Tensor
from torch.nn import functional as F

MIXES = {
    "decode": [SeqShape(n, 1) for n in (0, 1, 15, 16, 17, 100)],
    "prefill": [SeqShape(0, n) for n in (2, 15, 16, 17, 33)],
    "mixed": [SeqShape(0, 20), SeqShape(70, 1), SeqShape(33, 9), SeqShape(15, 1)],
}
#: Head counts that share a KV head: 1, 2, 3, 4, 7 and 8 query heads for each.
CASES = {
    "plain": make_spec(),
    "window-1": make_spec(window=1, heads=4, kv_heads=4),
    "window-24, softcap, heads of 80": make_spec(window=24, softcap=5.0, heads=3, kv_heads=1, dim=80),
    "heads of 256": make_spec(heads=4, kv_heads=1, dim=256),
    "heads of 96": make_spec(heads=7, kv_heads=1, dim=96),
    "window-16, many heads": make_spec(window=16, heads=16, kv_heads=2, dim=128),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


def compare(
    spec: AttentionSpec, shapes: list[SeqShape], dtype: torch.dtype, *, block_size: int = 16, has_wgmma: bool = False
) -> None:
    want = run_history_and_step(ReferenceBackend([spec.kv], block_size, dtype), spec, shapes, block_size, dtype)
    backend = CudaBackend([spec.kv], block_size, dtype, "cpu", num_programs=5, has_wgmma=has_wgmma)
    got = run_history_and_step(backend, spec, shapes, block_size, dtype)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_the_reference(case: str) -> None:
    compare(CASES[case], MIXES["mixed"], torch.float32)


def test_programs_that_share_a_kv_head_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads are divided among programs; here heads of 16 are."""
    monkeypatch.setattr(key_tiles, "MOST_VALUES", 48)
    spec = make_spec(heads=12, kv_heads=2, dim=16)
    assert tile_shape(spec, torch.float32).group == 3
    compare(spec, [SeqShape(0, 20), SeqShape(140, 1), SeqShape(5, 1), SeqShape(0, 2)], torch.float32)


@pytest.mark.parametrize("mix", MIXES)
def test_half_precision_equals_the_reference(mix: str) -> None:
    compare(make_spec(window=24, softcap=5.0), MIXES[mix], torch.float16)


@pytest.mark.parametrize("case", ["plain", "heads of 256", "window-16, many heads"])
def test_tiles_of_128_rows_equal_the_reference(case: str) -> None:
    """Tiles of 64, 32 and 16 queries: full ones, one with a query, and one that a window parts from the first keys."""
    spec = CASES[case]
    tile = tile_shape(spec, torch.float16, has_wgmma=True)
    assert (tile.queries * tile.group_rows, tile.num_warps) == (128, 8)
    shapes = [SeqShape(0, tile.queries + 1), SeqShape(33, 9), SeqShape(15, 1), SeqShape(20, tile.queries)]
    compare(spec, shapes, torch.float16, has_wgmma=True)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_every_block_size_equals_the_reference(block_size: int) -> None:
    compare(make_spec(), [SeqShape(0, 20), SeqShape(31, 2), SeqShape(40, 1)], torch.float32, block_size=block_size)


def test_a_token_without_a_slot_is_not_written() -> None:
    spec = make_spec()
    cache = torch.zeros(3, 2, spec.kv.num_kv_heads, 4, spec.kv.head_dim)
    _, k, v = random_qkv(spec, 4, torch.float32, seed=0)

    write_kv(cache, k, v, torch.tensor([9, -1, 3, -1]))

    slots = cache.transpose(2, 3).transpose(1, 2).flatten(0, 1)  # [blocks * block_size, 2, kv_heads, head_dim]
    assert slots[:, 0, 0, 0].nonzero().flatten().tolist() == [3, 9]
    for slot, token in ((9, 0), (3, 2)):
        torch.testing.assert_close(slots[slot, 0], k[token], atol=0, rtol=0)
        torch.testing.assert_close(slots[slot, 1], v[token], atol=0, rtol=0)


def test_stale_contents_of_a_block_are_never_read() -> None:
    spec, shapes = make_spec(window=9), [SeqShape(16, 1), SeqShape(0, 5), SeqShape(30, 3)]
    outputs = []
    for fill in (0.0, float("nan")):
        batch, num_blocks = make_batch(shapes, 16)
        backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
        backend.allocate(num_blocks)
        backend.caches[0].fill_(fill)
        backend.allocate = lambda num_blocks: None  # type: ignore[method-assign]
        outputs.append(run_history_and_step(backend, spec, shapes, 16, torch.float32))
        assert len(batch.slots) == len(outputs[-1])
    assert torch.equal(outputs[0], outputs[1])


def test_a_sequence_of_nan_leaves_the_others_alone() -> None:
    spec, shapes = make_spec(), [SeqShape(0, 3), SeqShape(0, 4)]
    batch, num_blocks = make_batch(shapes, 16)
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
    backend.allocate(num_blocks)
    q, k, v = random_qkv(spec, 7, torch.float32, seed=0)
    k[:3] = float("nan")

    backend.begin_step(batch)
    out = backend.attend(spec, q, k, v, batch)

    assert out[:3].isnan().all()
    assert out[3:].isfinite().all()


def test_a_row_of_padding_changes_nothing() -> None:
    spec = make_spec()
    batch, num_blocks = make_batch([SeqShape(600, 1), SeqShape(3, 1)], 16)
    padded, _ = part_of(batch, [0, 1], padding=2)
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
    backend.allocate(num_blocks)
    backend.caches[0].normal_(generator=torch.Generator().manual_seed(1))
    qkv = random_qkv(spec, 4, torch.float32, seed=2)
    outputs = []
    for step, rows in ((batch, 2), (padded, 4)):
        backend.begin_step(step)
        outputs.append(backend.attend(spec, *(x[:rows] for x in qkv), step))
    assert torch.equal(outputs[1][:2], outputs[0])
    assert not outputs[1][2:].any()


@pytest.mark.parametrize("window", [None, 9])
def test_several_rows_of_padding_are_a_sequence_without_keys(window: int | None) -> None:
    spec = make_spec(window=window)
    batch, num_blocks = make_batch([SeqShape(20, 3), SeqShape(40, 1)], 16)
    padded = replace(
        batch,
        query_start=torch.cat([batch.query_start, batch.query_start[-1:] + 5]),
        seq_lens=F.pad(batch.seq_lens, (0, 1)),
        block_tables=F.pad(batch.block_tables, (0, 0, 0, 1)),
        slots=F.pad(batch.slots, (0, 5), value=-1),
        max_query_len=9,
    )
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
    backend.allocate(num_blocks)
    backend.caches[0].normal_(generator=torch.Generator().manual_seed(1))
    qkv = random_qkv(spec, 9, torch.float32, seed=2)
    outputs = []
    for step, rows in ((batch, 4), (padded, 9)):
        backend.begin_step(step)
        outputs.append(backend.attend(spec, *(x[:rows] for x in qkv), step))
    assert torch.equal(outputs[1][:4], outputs[0])
    assert not outputs[1][4:].any()


@pytest.mark.parametrize("case", ["plain", "heads of 96"], ids=["several KV heads", "one KV head"])
def test_rows_whose_heads_are_apart_equal_contiguous_ones(case: str) -> None:
    """Families with partial rotation hand over tensors that lie in memory as [heads, tokens, head_dim]."""

    class HeadsFirst(CudaBackend):
        def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
            return super().attend(spec, *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)), batch)

    spec = CASES[case]
    outputs = [
        run_history_and_step(
            backend([spec.kv], 16, torch.float32, "cpu", num_programs=5), spec, MIXES["mixed"], 16, torch.float32
        )
        for backend in (CudaBackend, HeadsFirst)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], atol=0, rtol=0)
