"""The native attention kernel against its definition in torch, bit for bit, at the best level of this CPU."""

import pytest
import torch
from octavo_testing.attention_bits import SPECS, Arithmetic, attend_to_prompt, attention_bits, fused
from octavo_testing.kernel_levels import levels_to_test

BEST = levels_to_test()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tokens", [18, 257])
def test_outputs_have_the_bits_of_the_definition(name: str, tokens: int, dtype: torch.dtype) -> None:
    got, (q, k, v) = attend_to_prompt(SPECS[name], BEST, tokens, dtype)
    assert torch.equal(got[-2:], attention_bits(SPECS[name], q[-2:], k, v, Arithmetic.of_level(BEST)))


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    a, c = torch.tensor(1 + 2.0**-12), torch.tensor([2.0**-60, -(2.0**-60), -(2.0**-24), 3.0])
    exact = [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11, 1 + 2.0**-11, 4 + 2.0**-11]
    assert fused(a, a, c).tolist() == exact
