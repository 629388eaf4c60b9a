"""Parts of the steps of `benchmarks/gpu`: how tokens are compared, and torch's attention by versions of its API."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu.")]:
        monkeypatch.delitem(sys.modules, name)


def causal(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """Compute the attention of [tokens, heads, size]; unequal numbers of heads need `enable_gqa`."""
    heads_first = [each.transpose(0, 1)[None] for each in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, is_causal=True, **more)[0].transpose(0, 1)


def torch_2_10(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, n: int, m: int, is_causal: bool = False
) -> Tensor:
    assert is_causal
    return causal(q, k, v)


def torch_2_11(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, n: int, m: int, *, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    assert window_size == (-1, 0)
    return causal(q, k, v)


def torch_2_13(
    q: Tensor, k: Tensor, v: Tensor, *rest: object, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False
) -> Tensor:
    assert window_size == (-1, 0)
    return causal(q, k, v, enable_gqa=enable_gqa)


@pytest.mark.parametrize("varlen", [torch_2_10, torch_2_11, torch_2_13, None], ids=str)
def test_attention_of_each_version_of_torch_is_causal_over_shared_heads(varlen: Callable[..., Tensor] | None) -> None:
    from gpu.steps.speed import HEAD_DIM, HEADS, KV_HEADS, peer_attention

    q, k, v = (torch.randn(7, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = peer_attention(varlen, q, k, v)()
    found = found[0].transpose(0, 1) if varlen is None else found
    torch.testing.assert_close(found, causal(q, k, v, enable_gqa=True))


def output(tokens: list[int], gap: float = 0.0) -> SimpleNamespace:
    """Return an output whose tokens 7 and 8 are `gap` apart at each place."""
    near = {7: SimpleNamespace(logprob=-1.0), 8: SimpleNamespace(logprob=-1.0 - gap)}
    return SimpleNamespace(token_ids=tokens, finish_reason="length", logprobs=[near] * len(tokens))


@pytest.mark.parametrize(
    ("found", "wanted", "gap"),
    [
        ([7, 8], output([7, 8]), None),
        ([7, 8], output([7, 7], 0.001), 0.001),
        ([7, 8], output([7, 7], 0.5), 0.5),
        ([7, 9], output([7, 7], 0.001), float("inf")),  # 9 is not among the most likely
        ([7], output([7, 7]), float("inf")),
        ([], output([]), float("inf")),  # a request that failed
    ],
)
def test_the_first_token_that_differs_decides(found: list[int], wanted: Any, gap: float | None) -> None:
    from gpu.steps.tokens import first_gap

    difference = first_gap(output(found), wanted)
    assert (None if difference is None else difference[0]) == (gap if gap is None else pytest.approx(gap))
