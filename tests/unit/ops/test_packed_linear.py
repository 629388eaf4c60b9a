"""Packed linears equal plain ones, and fall back to them where torch's private operators are missing or refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo_engine.ops import packed_linear as module
from octavo_engine.ops.packed_linear import pack, packed_linear
from torch.nn import functional as F

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def refuse(*arguments: Any) -> torch.Tensor:
    raise RuntimeError("this CPU can't")


BROKEN = {
    "no such operators": SimpleNamespace(),
    "refused when packing": SimpleNamespace(
        _is_mkldnn_bf16_supported=lambda: True, _reorder_linear_weight=refuse, _linear_pointwise=refuse
    ),
    "refused when multiplying": SimpleNamespace(
        _is_mkldnn_bf16_supported=lambda: True, _reorder_linear_weight=lambda w, n: w, _linear_pointwise=refuse
    ),
    "another signature": SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True, _reorder_linear_weight=lambda w: w),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("rows", [(1,), (3,), (65,), (2, 5)], ids=str)
def test_equals_a_plain_linear(dtype: torch.dtype, bias: bool, rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 72, generator=generator).to(dtype) / 8
    x = torch.randn(*rows, 72, generator=generator).to(dtype)
    b = torch.randn(40, generator=generator).to(dtype) if bias else None
    packed = pack(weight, b)
    assert (packed.out_features, packed.in_features) == (40, 72)
    want = F.linear(x.float(), weight.float(), None if b is None else b.float())
    got = packed_linear(x, packed)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_this_torch_has_the_private_operators() -> None:
    """If this fails after an upgrade of torch, `packed_linear.py` needs a look: everything still works, but slower."""
    assert pack(torch.randn(8, 8)).packed is not None


def test_a_transposed_weight_and_strided_rows() -> None:
    weight, x = torch.randn(24, 16).t(), torch.randn(5, 48)[:, 8:32]
    torch.testing.assert_close(packed_linear(x, pack(weight)), F.linear(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_falls_back_to_the_plain_weight(monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(module, "_mkldnn", lambda: BROKEN[fault])
    weight, x = torch.randn(6, 4).to(dtype), torch.randn(3, 4).to(dtype)
    packed = pack(weight)
    assert packed.packed is None
    assert torch.equal(packed_linear(x, packed), F.linear(x, weight))


def test_exactly_one_form_is_kept() -> None:
    packed = pack(torch.randn(8, 8))
    assert (packed.packed is None) != (packed.plain is None)
