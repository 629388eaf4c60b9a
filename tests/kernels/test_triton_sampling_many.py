"""The sampling kernel, in the interpreter: 1 120 rows equal the CPU's but for near ties; the distribution of draws."""

import numpy as np
import pytest
import torch
from octavo_engine.ops.sampling import DrawParams
from octavo_engine.ops.triton import sampling
from octavo_testing.draw_cases import FILTERS, chi_square_excess, draw_params, near_ties, random_logits
from torch import Tensor

pytestmark = pytest.mark.slow


def kernel(logits: Tensor, params: DrawParams) -> Tensor:
    return sampling.sample(logits, torch.from_numpy(params.view(np.int32).reshape(-1, 8)))


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_equal_the_cpus(name: str, scale: float) -> None:
    logits = random_logits(20, 3000, seed=7, scale=scale)
    assert near_ties(logits, draw_params(20, 3000, seed=11, **FILTERS[name]), kernel) <= 1


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6, "min_p": 0.02}], ids=str)
def test_draws_follow_the_distribution(fields: dict[str, float]) -> None:
    draws, logits = 3000, random_logits(1, 40, seed=1)
    tokens = kernel(logits.expand(draws, -1).contiguous(), draw_params(draws, 40, **fields))
    assert chi_square_excess(tokens, logits, **fields) < 4
