"""The sampling kernel against its torch form, at all CPU levels: the same tokens, alone and among other rows."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from octavo_engine.ops import sampling as module
from octavo_engine.ops.native_library import load_library
from octavo_engine.ops.sampling import DrawParams, ranks_natively, sample_natively
from octavo_engine.sampling.draws import choose_tokens_reference
from octavo_testing.draw_cases import FILTERS, NEVER, draw_params, near_ties, random_logits
from octavo_testing.kernel_levels import level_cases
from torch import Tensor


@pytest.fixture(scope="module", params=level_cases(by_vectors=True), autouse=True)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_library("g++", request.param)


@pytest.fixture(autouse=True)
def _level(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    monkeypatch.setattr(module, "kernels_for", lambda logits: library)


@pytest.mark.parametrize("vocab", [1, 5, 130, 1024, 3001])
def test_kernel_equals_torch(vocab: int) -> None:
    for scale in (0.01, 3.0, 8.0):
        logits = random_logits(20, vocab, scale=scale)
        differing = {name: near_ties(logits, draw_params(20, vocab, **fields)) for name, fields in FILTERS.items()}
        assert not any(differing.values()), differing


def one_token_left(rows: int, vocab: int) -> Tensor:
    logits = torch.full((rows, vocab), NEVER)
    logits[torch.arange(rows), torch.arange(rows) * 7 % vocab] = torch.arange(rows) - 9.0
    return logits


RARE: dict[str, Callable[[int, int], Tensor]] = {
    "equal": lambda rows, vocab: torch.full((rows, vocab), -3.0),
    "ties": lambda rows, vocab: random_logits(rows, vocab).bfloat16().float(),
    "few-values": lambda rows, vocab: random_logits(rows, vocab).round(),
    "one-token-left": one_token_left,
    "some-masked": lambda rows, vocab: random_logits(rows, vocab).masked_fill(random_logits(rows, vocab) < 1.0, NEVER),
    "huge": lambda rows, vocab: random_logits(rows, vocab, scale=1e37),
    "far": lambda rows, vocab: random_logits(rows, vocab) + 3e4,
    "sorted": lambda rows, vocab: random_logits(rows, vocab).sort().values,
}


@pytest.mark.parametrize("kind", RARE)
def test_kernel_equals_torch_on_rare_rows(kind: str) -> None:
    logits = RARE[kind](20, 1000)
    differing = {name: near_ties(logits, draw_params(20, 1000, **fields)) for name, fields in FILTERS.items()}
    assert not any(differing.values()), differing


def mixed_params(rows: int, vocab: int) -> DrawParams:
    """Return parameters that use each of the filters in turn."""
    parts = [draw_params(rows, vocab, **fields) for fields in FILTERS.values()]
    return np.array([parts[i % len(parts)][i] for i in range(rows)])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_the_same_alone_and_among_others(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    logits, params = random_logits(64, 1501), mixed_params(64, 1501)
    together = sample_natively(logits, params)
    assert together is not None
    alone = [sample_natively(logits[i : i + 1], params[i : i + 1]) for i in range(64)]
    assert together.equal(torch.cat([token for token in alone if token is not None]))
    assert together.equal(choose_tokens_reference(logits, params))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 129, 999])
def test_a_row_that_is_not_finite_has_no_token(bad: float, at: int) -> None:
    logits, params = random_logits(64, 1000), mixed_params(64, 1000)
    want = sample_natively(logits, params)
    logits[[3, 9, 63], at] = bad
    logits[5] = NEVER
    assert want is not None
    want[[3, 5, 9, 63]] = -1
    got = sample_natively(logits, params)
    assert got is not None
    assert got.equal(want)
    assert choose_tokens_reference(logits, params).equal(want)


def test_rows_may_lie_apart() -> None:
    wide, params = random_logits(9, 1007), mixed_params(9, 1000)
    want = sample_natively(wide[:, :1000].contiguous(), params)
    got = sample_natively(wide[:, :1000], params)
    assert got is not None
    assert want is not None
    assert got.equal(want)
    assert sample_natively(wide.t(), draw_params(1007, 9)) is None


@pytest.mark.parametrize("vocab", [1, 17, 4095, 4096, 4097, 9001])
def test_ranks_equal_a_sort(vocab: int) -> None:
    logits = (random_logits(5, vocab + 3) * 8).round()[:, :vocab] / 8  # rows apart, with many equal logits
    logits[1], logits[2, : vocab // 2], logits[3, ::2] = 0.0, NEVER, -0.0
    ids = torch.stack([torch.arange(200) * (row + 7) % vocab for row in range(5)])
    ids[:, -2], ids[:, -1] = 0, vocab - 1
    order = logits.sort(dim=1, descending=True, stable=True).indices
    expected = torch.empty_like(order).scatter_(1, order, torch.arange(1, vocab + 1).expand(5, -1))
    ranks = ranks_natively(logits, ids)
    assert ranks is not None
    assert torch.equal(ranks, expected.gather(1, ids))


@pytest.mark.parametrize("token", [-1, 20])
def test_ranks_of_other_ids_are_refused(token: int) -> None:
    with pytest.raises(AssertionError):
        ranks_natively(random_logits(1, 20), torch.tensor([[3, token]]))
