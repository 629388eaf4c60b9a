"""The Triton attention kernel against the reference, over the product of mixes, head shapes, windows and types."""

from dataclasses import replace

import pytest
import torch
from octavo_engine.ops.attention import AttentionSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.reference import ReferenceBackend
from octavo_testing.attention_cases import E4M3Reference, SeqShape, make_spec, run_history_and_step

pytestmark = pytest.mark.slow

MIXES = {
    "decode": [SeqShape(n, 1) for n in (1, 15, 16, 17, 31, 32, 100, 257)],
    "prefill": [SeqShape(0, n) for n in (1, 2, 15, 16, 17, 33, 70)],
    "mixed": [SeqShape(0, 40), SeqShape(90, 1), SeqShape(0, 1), SeqShape(33, 20), SeqShape(15, 1), SeqShape(0, 41)],
    "long": [SeqShape(700, 1), SeqShape(600, 60), SeqShape(511, 2), SeqShape(0, 130)],
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 24, 300], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_every_mask_equals_the_reference(
    mix: str, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    spec = make_spec(window=window, softcap=softcap)
    want = run_history_and_step(ReferenceBackend([spec.kv], 16, dtype), spec, MIXES[mix], 16, dtype)
    got = run_history_and_step(CudaBackend([spec.kv], 16, dtype, "cpu", num_programs=5), spec, MIXES[mix], 16, dtype)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("dim", [24, 64, 80, 96, 128, 256])
def test_every_head_shape_equals_the_reference(group: int, dim: int) -> None:
    spec = make_spec(heads=2 * group, kv_heads=2, dim=dim)
    want = run_history_and_step(ReferenceBackend([spec.kv], 16, torch.float32), spec, MIXES["mixed"], 16, torch.float32)
    got = run_history_and_step(
        CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5), spec, MIXES["mixed"], 16, torch.float32
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "dim"), [(128, 576), (20, 576), (40, 288)])  # DeepSeek, GLM-4-MoE-Lite, MiniCPM3
def test_latents_equal_the_reference(heads: int, dim: int) -> None:
    spec = make_spec(heads=heads, kv_heads=1, dim=dim)
    shapes = [SeqShape(0, 7), SeqShape(150, 1), SeqShape(3, 1), SeqShape(0, 1)]
    want = run_history_and_step(ReferenceBackend([spec.kv], 16, torch.float32), spec, shapes, 16, torch.float32)
    got = run_history_and_step(
        CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5), spec, shapes, 16, torch.float32
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    compare_fp8(spec, shapes, 2e-3, torch.float16)


@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 2047, 2048, 2049, 2500])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_windows_over_many_parts_equal_the_reference(window: int | None, softcap: float | None) -> None:
    spec = make_spec(heads=4, kv_heads=2, window=window, softcap=softcap)
    lengths = (1, 127, 128, 129, 500, 2047, 2048, 2049, 2176, 2177, 3100)
    shapes = [SeqShape(length - 1, 1) for length in lengths]
    want = run_history_and_step(ReferenceBackend([spec.kv], 16, torch.float32), spec, shapes, 16, torch.float32)
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
    got = run_history_and_step(backend, spec, shapes, 16, torch.float32)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def compare_fp8(spec: AttentionSpec, shapes: list[SeqShape], tolerance: float, dtype: torch.dtype) -> None:
    spec = replace(spec, kv=replace(spec.kv, k_scale=0.02, v_scale=0.03))
    want = run_history_and_step(E4M3Reference([spec.kv], 16), spec, shapes, 16, dtype)
    backend = CudaBackend([spec.kv], 16, torch.float8_e4m3fn, "cpu", num_programs=5)
    got = run_history_and_step(backend, spec, shapes, 16, dtype)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 24, 300], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_every_mask_over_an_fp8_cache_equals_fp32_over_its_codes(
    mix: str, dtype: torch.dtype, tolerance: float, window: int | None, softcap: float | None
) -> None:
    compare_fp8(make_spec(window=window, softcap=softcap), MIXES[mix], tolerance, dtype)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("dim", [24, 64, 80, 96, 128, 256])
def test_every_head_shape_over_an_fp8_cache_equals_fp32_over_its_codes(group: int, dim: int) -> None:
    compare_fp8(make_spec(heads=2 * group, kv_heads=2, dim=dim), MIXES["mixed"], 2e-3, torch.float16)


@pytest.mark.parametrize("window", [None, 127, 2048, 2500])
def test_many_parts_of_an_fp8_cache_equal_fp32_over_its_codes(window: int | None) -> None:
    shapes = [SeqShape(length - 1, 1) for length in (1, 128, 129, 500, 2048, 2049, 3100)]
    compare_fp8(make_spec(heads=4, kv_heads=2, window=window), shapes, 2e-3, torch.float16)
