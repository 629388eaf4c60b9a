"""A KV cache of e4m3 codes, in the interpreter: what the kernels write, and what they read from it.

Most of these tests widen codes by shifts, as sm_80 does: the interpreter alone converts e4m3 wrongly.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.triton.write_kv import write_kv
from octavo_testing.attention_cases import (
    E4M3Reference,
    SeqShape,
    e4m3_codes,
    make_batch,
    make_spec,
    random_qkv,
    run_history_and_step,
)
from octavo_testing.kernel_cases import fused_code_pairs
from octavo_testing.triton_device import exact_e4m3
from torch import Tensor

E4M3 = torch.float8_e4m3fn
SHAPES = [SeqShape(0, 9), SeqShape(140, 1), SeqShape(33, 5)]


def backend_of(*specs: LayerKVSpec, has_e4m3: bool = False) -> CudaBackend:
    return CudaBackend(list(specs), 16, E4M3, "cpu", num_programs=5, has_e4m3=has_e4m3)


def written(values: Tensor, scale: float = 1.0) -> Tensor:
    """Return the codes that the kernel writes for K; values of V are half as large, and so is their scale."""
    rows = values.view(-1, 16, 64)
    cache = torch.zeros(-(-len(rows) // 16), 2, 16, 16, 64, dtype=torch.uint8)
    write_kv(cache, rows, rows / 2, torch.arange(len(rows)), (scale, scale / 2))
    k, v = (cache[:, i].transpose(1, 2).flatten(0, 1)[: len(rows)].flatten().view(E4M3) for i in range(2))
    finite = (values.abs() < 1e4) & (values.abs() > 1e-2)
    assert torch.equal(k.float()[finite], v.float()[finite])
    return k


def test_every_half_precision_number_becomes_the_nearest_code() -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values[values.isnan()] = float("nan")  # numpy warns of signalling ones
    got, want = written(values), e4m3_codes(values)
    is_number = ~values.isnan()
    assert torch.equal(got[is_number].view(torch.uint8), want[is_number].view(torch.uint8))
    assert got[~is_number].isnan().all()
    assert got.float()[is_number].abs().max() == 448
    assert not got.float()[values == 0].any()


def test_ties_go_to_the_even_code_and_large_numbers_to_the_largest() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    values = torch.cat([values, torch.tensor([1e4, 448.1, 465.0, 3e38, float("inf"), 1e-30, 0.0])])
    values = torch.cat([values, -values])
    values = torch.cat([values, values.new_zeros(-len(values) % 1024)])
    assert torch.equal(written(values).view(torch.uint8), e4m3_codes(values).view(torch.uint8))
    assert torch.equal(written(values * 0.25, 0.25).view(torch.uint8), e4m3_codes(values).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("queries", [1, 2], ids=["decode", "prompt"])
@pytest.mark.parametrize("has_e4m3", [False, True], ids=["by shifts", "by its instruction"])
def test_every_code_is_read_as_its_number_and_nan_stays_nan(queries: int, dtype: torch.dtype, has_e4m3: bool) -> None:
    spec = make_spec(heads=4, kv_heads=4, dim=64)
    backend = backend_of(LayerKVSpec(num_kv_heads=4, head_dim=64, v_scale=0.5), has_e4m3=has_e4m3)
    batch, num_blocks = make_batch([SeqShape(0, queries)], 16)
    backend.allocate(num_blocks)
    codes = torch.arange(256, dtype=torch.uint8)
    backend.caches[0][0, 1, :, 0] = codes.view(4, 64)
    batch.slots.fill_(-1)
    backend.begin_step(batch)
    with exact_e4m3() if has_e4m3 else nullcontext():
        out = backend.attend(spec, *(torch.ones(queries, 4, 64, dtype=dtype) for _ in range(3)), batch)
    values = codes.view(E4M3).float() / 2
    assert torch.equal(out[0].flatten().float().nan_to_num(1e4), values.nan_to_num(1e4))


def test_a_key_of_nan_makes_its_own_sequence_nan() -> None:
    spec = make_spec()
    batch, num_blocks = make_batch([SeqShape(0, 3), SeqShape(0, 4), SeqShape(0, 1)], 16)
    backend = backend_of(spec.kv)
    backend.allocate(num_blocks)
    q, k, v = random_qkv(spec, 8, torch.float16, seed=0)
    k[1, :, 5], k[7, :, 0] = float("nan"), float("nan")
    backend.begin_step(batch)
    out = backend.attend(spec, q, k, v, batch)
    assert out[[1, 2, 7]].isnan().all()
    assert out[[0, 3, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize(
    ("window", "softcap", "dtype", "tolerance"), [(None, None, torch.float32, 1e-5), (24, 5.0, torch.float16, 2e-3)]
)
def test_attention_equals_fp32_over_the_same_codes(
    window: int | None, softcap: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    kv = LayerKVSpec(num_kv_heads=2, head_dim=64, window=window, k_scale=0.02, v_scale=0.03)
    spec = replace(make_spec(window=window, softcap=softcap), kv=kv)
    want = run_history_and_step(E4M3Reference([kv], 16), spec, SHAPES, 16, dtype)
    got = run_history_and_step(backend_of(kv), spec, SHAPES, 16, dtype)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_large_values_and_rows_of_zeros_are_attended_to() -> None:
    """A key of 1e4 is one of 448; zeros stay zeros."""
    spec = make_spec(heads=2, kv_heads=2)
    batch, num_blocks = make_batch([SeqShape(0, 5)], 16)
    qkv = [torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    qkv[1][1], qkv[2][2], qkv[2][3] = 1e4, -1e4, 0.0
    outputs = []
    for backend in (backend_of(spec.kv), E4M3Reference([spec.kv], 16)):
        backend.allocate(num_blocks)
        backend.begin_step(batch)
        outputs.append(backend.attend(spec, *qkv, batch))
    torch.testing.assert_close(*outputs, atol=1e-3, rtol=1e-4)
    assert outputs[0].isfinite().all()


def test_the_fused_write_rounds_what_a_wide_cache_gets() -> None:
    """Keys are rounded to the type of the model before, as where no kernel fuses norm, rotation and write."""
    for codes, want in fused_code_pairs(80, 48, has_norm=True, dtype=torch.float16).values():
        assert torch.equal(codes, want)
        assert codes.unique().numel() > 100


def test_copies_and_swaps_keep_every_byte() -> None:
    specs = [LayerKVSpec(num_kv_heads=2, head_dim=24), LayerKVSpec(num_kv_heads=1, head_dim=8)]
    backend = backend_of(*specs)
    assert (
        2 * backend.bytes_per_block() == CudaBackend(specs, 16, torch.float16, "cpu", num_programs=5).bytes_per_block()
    )
    backend.allocate(6)
    for cache in backend.caches:  # NaN and both zeros are among them
        cache.copy_(torch.randint(256, cache.shape, generator=torch.Generator().manual_seed(1)))
    before = [cache.clone() for cache in backend.caches]
    host = torch.zeros((4, backend.bytes_per_block()), dtype=torch.uint8)
    backend.swap_out([(0, 3), (4, 1)], host)
    backend.swap_in([(3, 2), (1, 5)], host)
    backend.copy_blocks([(0, 1), (4, 3)])
    for cache, old in zip(backend.caches, before, strict=True):
        assert torch.equal(cache, old[[0, 0, 0, 4, 4, 4]])
