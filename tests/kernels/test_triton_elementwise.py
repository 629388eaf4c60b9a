"""The fused Triton kernels, in the interpreter, against torch's operators."""

import math

import pytest
import torch
from octavo_engine.ops import triton_devices
from octavo_engine.ops.activation import ACTIVATIONS, act_mul
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.norm import RMSWeight, rms_norm, rms_norm_reference, rms_weight
from octavo_engine.ops.reference import ReferenceBackend
from octavo_engine.ops.rope import Rotation
from octavo_testing.attention_cases import SeqShape, make_batch, make_spec, random_qkv
from octavo_testing.kernel_cases import angles, fused_write_pairs, gate_pair, norm_pairs, random

TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3}
TYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_devices, "DEVICES", {"cpu"})


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, check_dtype=False)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [7, 64, 576])
def test_a_norm_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    for got, want in norm_pairs(5, size, dtype).values():
        assert_close(got, want)


def test_a_norm_takes_strided_rows_and_a_weight_for_each_head() -> None:
    fused = random(3, 6, 32)
    weight = rms_weight(random(4, 32, seed=1), 1e-6)
    assert_close(rms_norm(fused[:, :4], weight), rms_norm_reference(fused[:, :4], weight))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("size", [5, 1024, 1500])
def test_a_gate_equals_the_reference(name: str, size: int, dtype: torch.dtype) -> None:
    assert_close(*gate_pair(name, 4, size, dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary", "has_norm"), [(80, 80, True), (96, 48, False), (64, 0, False)])
def test_a_fused_write_equals_its_parts(dim: int, rotary: int, has_norm: bool, dtype: torch.dtype) -> None:
    pairs = fused_write_pairs(dim, rotary, has_norm, dtype)
    torch.testing.assert_close(*pairs["queries"], atol=TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype], check_dtype=False)
    torch.testing.assert_close(*pairs["cache"], atol=TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 80), (96, 48), (64, 0)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_attention_with_norm_and_rotation_equals_its_parts(
    dim: int, rotary: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Both backends hold equal caches afterwards, which the second step reads."""
    spec = make_spec(heads=6, kv_heads=2, dim=dim)
    norm: RMSWeight | None = rms_weight(1 + random(8, dim, seed=3) / 10, 1e-6) if has_norm else None
    outputs: list[list[torch.Tensor]] = []
    for backend in (
        ReferenceBackend([spec.kv], 16, dtype),
        CudaBackend([spec.kv], 16, dtype, "cpu", num_programs=5),
    ):
        backend.allocate(10)
        outputs.append([])
        for computed, queries, seed in ((0, 20, 1), (20, 1, 2)):
            batch, _ = make_batch([SeqShape(computed, queries)], 16)
            fused = torch.cat(random_qkv(spec, queries, dtype, seed=seed), 1)
            rotation = Rotation(*angles(queries, rotary, dtype).unbind(1)) if rotary else None
            backend.begin_step(batch)
            outputs[-1].append(backend.attend_qkv(spec, fused[:, :8], fused[:, 8:], norm, rotation, batch))
    for got, want in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(got, want, atol=10 * TOLERANCE[dtype], rtol=10 * TOLERANCE[dtype])


def test_a_token_without_a_slot_gets_a_query_and_writes_nothing() -> None:
    spec = make_spec()
    backend = CudaBackend([spec.kv], 16, torch.float32, "cpu", num_programs=5)
    backend.allocate(2)
    batch, _ = make_batch([SeqShape(0, 2)], 16)
    batch.slots.fill_(-1)
    fused = torch.cat(random_qkv(spec, 2, torch.float32, seed=1), 1)
    backend.begin_step(batch)
    assert backend.attend_qkv(spec, fused[:, :6], fused[:, 6:], None, None, batch).shape == (2, 4, 64)
    assert not backend.caches[0].any()


def test_a_row_of_large_values_stays_finite() -> None:
    weight = rms_weight(torch.ones(64), 1e-6)
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    assert rms_norm(x, weight).tolist() == [[pytest.approx(1.0, abs=1e-3)] * 64]
    assert math.isfinite(act_mul(torch.full((1, 2), 1e4), ACTIVATIONS["gelu_pytorch_tanh"]).item())
