"""Norms and gated activations against the formula in fp64, in each type, at critical sizes."""

import pytest
import torch
from octavo_engine.ops.activation import ACTIVATIONS, act_mul
from octavo_engine.ops.norm import add_rms_norm, rms_norm, rms_weight
from torch import Tensor
from transformers.activations import ACT2FN

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_rms_norm_rounds_once(dtype: torch.dtype, scale: float) -> None:
    """The sum of squares in fp16 would overflow at 300, and eps matters at 1e-4."""
    x = (torch.randn(7, 96, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    weight = torch.randn(96, generator=torch.Generator().manual_seed(2))
    result = rms_norm(x, rms_weight(weight, 1e-6))
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), formula(x, weight, 1e-6), rtol=ROUNDING[dtype], atol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), rms_weight(torch.ones(8), 1e-6)).equal(torch.zeros(2, 8))


def test_rms_norm_supports_a_weight_per_head() -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    result = rms_norm(x, rms_weight(weight, 1e-6)).double()
    torch.testing.assert_close(result, formula(x, weight, 1e-6), rtol=2e-6, atol=1e-6)


def test_add_rms_norm_changes_the_residual_alone() -> None:
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    total, before = x + residual, x.clone()
    result = add_rms_norm(x, residual, rms_weight(weight, 1e-6))
    assert residual.equal(total)
    assert x.equal(before)
    torch.testing.assert_close(result.double(), formula(total, weight, 1e-6), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers(name: str) -> None:
    gate, up = torch.randn(4, 32), torch.randn(4, 32)
    torch.testing.assert_close(ACTIVATIONS[name](gate), ACT2FN[name](gate), rtol=1e-5, atol=1e-6)
    fused = torch.cat((gate, up), -1)
    before = fused.clone()
    torch.testing.assert_close(act_mul(fused, ACTIVATIONS[name]), ACT2FN[name](gate) * up, rtol=1e-5, atol=1e-6)
    assert fused.equal(before)


def test_gate_is_the_first_half() -> None:
    assert act_mul(torch.tensor([[-1.0, 2.0]]), ACTIVATIONS["relu"]).item() == 0.0
