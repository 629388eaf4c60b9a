"""The native attention kernel against its definition and against fp64, at every level of this CPU."""

import pytest
import torch
from octavo_engine.ops.attention import AttentionSpec
from octavo_engine.ops.cpu_level import Level
from octavo_testing.attention_bits import SPECS, Arithmetic, attend_to_prompt, attention_bits
from octavo_testing.attention_cases import make_spec
from octavo_testing.kernel_levels import levels_to_test
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.slow

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LEVELS = pytest.mark.parametrize("level", levels_to_test(), ids=lambda level: level.name)


@TYPES
@LEVELS
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tokens", [1, 16, 18, 255, 256, 257, 1100])
def test_outputs_have_the_bits_of_the_definition(name: str, level: Level, tokens: int, dtype: torch.dtype) -> None:
    got, (q, k, v) = attend_to_prompt(SPECS[name], level, tokens, dtype)
    rows = min(tokens, 3)
    assert torch.equal(got[-rows:], attention_bits(SPECS[name], q[-rows:], k, v, Arithmetic.of_level(level)))


@TYPES
@pytest.mark.parametrize("name", SPECS)
def test_levels_with_fused_operations_have_equal_bits(name: str, dtype: torch.dtype) -> None:
    outputs = [
        attend_to_prompt(SPECS[name], level, 300, dtype)[0] for level in levels_to_test() if level.name != "x86-64"
    ]
    assert all(torch.equal(outputs[0], output) for output in outputs)


@TYPES
@LEVELS
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap"),
    [
        (9, 3, 64, None, None),
        (32, 8, 128, None, None),
        (8, 8, 80, 100, None),
        (16, 1, 256, None, 30.0),
        (6, 2, 36, None, None),
        (64, 8, 64, 128, None),
        (3, 3, 96, None, None),
        (4, 1, 576, None, None),
    ],
)
def test_the_error_is_that_of_torch(
    level: Level, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    spec = make_spec(heads=heads, kv_heads=kv_heads, dim=dim, window=window, softcap=softcap)
    got, (q, k, v) = attend_to_prompt(spec, level, 500, dtype)
    exact = expected(spec, q.double(), k.double(), v.double())
    of_torch = expected(spec, q, k, v)
    in_order = 2e-9 * max(dim, 256)  # the kernel adds products of all dimensions in order, torch those of parts
    assert error(got, exact) <= 1.1 * error(of_torch, exact) + in_order


def expected(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by torch in the type of `q`; it computes scores with a soft cap in fp32 at least."""
    position = torch.arange(len(q))
    mask = position[None] <= position[:, None]
    if spec.kv.window is not None:
        mask &= position[None] > position[:, None] - spec.kv.window
    k, v = (x.repeat_interleave(spec.num_heads // spec.kv.num_kv_heads, dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if spec.softcap is None:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=spec.scale)[0]
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.tanh(q.to(wide) @ k.to(wide).transpose(1, 2) * spec.scale / spec.softcap) * spec.softcap
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v
    return out.transpose(0, 1)


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())
