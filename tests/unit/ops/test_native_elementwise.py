"""Norm, rotation and gated activation in C++ against the torch functions, on ragged sizes."""

import pytest
import torch
from octavo_engine.ops import activation, norm, rope
from octavo_engine.ops.activation import ACTIVATIONS, act_mul, act_mul_reference
from octavo_engine.ops.gather import TablePart, gather_rows
from octavo_engine.ops.norm import add_rms_norm, rms_norm, rms_norm_reference, rms_weight
from octavo_engine.ops.rope import rotate_, rotate_reference_
from torch import Tensor

ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7}
SIZES = [1, 7, 16, 33, 576]
ROWS = [1, 3, 130]  # the last is shared between threads, at the larger sizes


@pytest.fixture(autouse=True, params=[1, 2], ids=["one-thread", "two-threads"])
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


@pytest.fixture(params=ROUNDING, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=ROUNDING[got.dtype] / 4, rtol=ROUNDING[got.dtype])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_norm_equals_torch(dtype: torch.dtype, rows: int, size: int) -> None:
    weight = rms_weight(random(size, dtype=torch.float32, seed=1), 1e-5)
    wide = random(rows, size + 5, dtype=dtype)
    check(rms_norm(wide[:, :size], weight), rms_norm_reference(wide[:, :size], weight))
    update, residual = random(rows, size, dtype=dtype, seed=2), random(rows, size, dtype=dtype, seed=3)
    total = residual + update
    check(add_rms_norm(update, residual, weight), rms_norm_reference(total, weight))
    assert residual.equal(total)
    assert update.equal(random(rows, size, dtype=dtype, seed=2))


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_norm_of_heads_within_a_fused_tensor_equals_torch(dtype: torch.dtype, heads: int) -> None:
    weight = rms_weight(random(heads, 40, dtype=torch.float32, seed=1), 1e-5)
    x = random(5, heads + 2, 40, dtype=dtype)[:, :heads]
    check(rms_norm(x, weight), rms_norm_reference(x, weight))


def test_norm_of_a_transposed_tensor_equals_torch(dtype: torch.dtype) -> None:
    weight, x = rms_weight(random(8, dtype=torch.float32), 1e-5), random(8, 6, dtype=dtype).t()
    check(rms_norm(x, weight), rms_norm_reference(x, weight))
    residual, total = random(8, 6, dtype=dtype, seed=1).t(), random(8, 6, dtype=dtype, seed=1).t() + x
    check(add_rms_norm(x, residual, weight), rms_norm_reference(total, weight))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (80, 20), (256, 256), (6, 2)])
@pytest.mark.parametrize("rows", ROWS)
def test_rotation_equals_torch(dtype: torch.dtype, rows: int, head_dim: int, rotary_dim: int) -> None:
    fused = random(rows, 7, head_dim, dtype=dtype)
    cos, sin = random(rows, 2, 1, rotary_dim, dtype=dtype, seed=1).unbind(1)
    want = fused.clone().float()
    rotate_reference_(want[:, :4], cos.float(), sin.float())
    rotate_(fused[:, :4], cos, sin)
    torch.testing.assert_close(fused.float(), want, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    assert fused[:, 4:].equal(want[:, 4:].to(dtype))


@pytest.mark.parametrize("scale", [1.0, 24.0, 0.30078125])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_gathered_rows_equal_torch(dtype: torch.dtype, rows: int, size: int, scale: float) -> None:
    table = random(50, size, dtype=dtype)
    ids = torch.randint(50, (rows,), generator=torch.Generator().manual_seed(1))
    assert gather_rows(table, ids, scale).equal(table[ids].mul_(scale))


@pytest.mark.parametrize("kernels", [True, False])
def test_parts_of_a_table_sum_to_its_rows(kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part has no rows. Only the kernel checks ids."""
    if not kernels:
        monkeypatch.setattr("octavo_engine.ops.gather.kernels_for", lambda x: None)
    table, ids = random(50, 7, dtype=dtype), torch.tensor([0, 16, 17, 49, 16, *([50, -1] if kernels else [])])
    shares = (range(17), range(17, 50), range(50, 50))
    parts = [gather_rows(table[s.start : s.stop], ids, 3.0, TablePart(s.start, 50)) for s in shares]
    assert parts[0][[2, 3]].count_nonzero() == 0
    assert sum(parts)[:5].equal(table[ids[:5]] * 3.0)
    assert all(part[5:].isnan().all() for part in parts)


def test_an_id_without_a_row_gives_nan(dtype: torch.dtype) -> None:
    table = random(3, 5, dtype=dtype)
    got = gather_rows(table, torch.tensor([0, 3, -1, 2]))
    assert got[[0, 3]].equal(table[[0, 2]])
    assert got[1:3].isnan().all()


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_equals_torch(dtype: torch.dtype, rows: int, size: int, name: str) -> None:
    x = random(rows, 2 * size + 3, dtype=dtype)[:, : 2 * size] * 3
    assert ACTIVATIONS[name].native is not None
    check(act_mul(x, ACTIVATIONS[name]), act_mul_reference(x.double(), ACTIVATIONS[name]).to(dtype))


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gate_far_from_zero_is_exact(dtype: torch.dtype, name: str) -> None:
    gate = torch.tensor(
        [-1e30, -1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4, float("nan"), float("inf")], dtype=dtype
    )
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    got, want = act_mul(x, ACTIVATIONS[name]), act_mul_reference(x, ACTIVATIONS[name])
    torch.testing.assert_close(got, want, equal_nan=True)


def test_torch_computes_without_the_library(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    for module in (activation, norm, rope):
        monkeypatch.setattr(module, "kernels_for", lambda x: None)
    weight, x = rms_weight(random(8, dtype=torch.float32), 1e-5), random(3, 8, dtype=dtype)
    assert torch.equal(rms_norm(x, weight), rms_norm_reference(x, weight))
    assert torch.equal(act_mul(x, ACTIVATIONS["silu"]), act_mul_reference(x, ACTIVATIONS["silu"]))
    heads, cos = random(3, 2, 8, dtype=dtype), random(3, 1, 8, dtype=dtype, seed=1)
    want = heads.clone()
    rotate_reference_(want, cos, cos)
    rotate_(heads, cos, cos)
    assert torch.equal(heads, want)
