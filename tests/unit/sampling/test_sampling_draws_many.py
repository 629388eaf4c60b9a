"""The draw on real vocabularies and over 100 000 draws: kept tokens and distribution."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from octavo_engine.sampling.draws import choose_tokens, draw_keys, seed_keys
from octavo_testing.draw_cases import chi_square_excess, draw_params, random_logits, same_kept_tokens

pytestmark = pytest.mark.slow

DRAWS = 100_000
FIELDS = [{"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize(("vocab", "rows"), [(1024, 1000), (49_152, 40), (151_936, 20)], ids=str)
def test_kept_tokens_are_those_of_transformers(vocab: int, rows: int, fields: dict[str, Any]) -> None:
    """One row in a thousand may differ by its last token, where fp32 and fp64 round a threshold differently."""
    for scale in (0.1, 1.0, 4.0):
        assert same_kept_tokens(random_logits(rows, vocab, scale=scale), **fields) >= rows - rows // 1000


def keys_of(changes: str) -> npt.NDArray[np.uint64]:
    """Return keys of seeds and positions as n choices, a stream and a batch of 300 streams have them."""
    at, same = np.arange(DRAWS), np.full(DRAWS, 7)
    seeds, positions = {"seed": (at, same), "position": (same, at), "both": (at // 300, at % 300)}[changes]
    return draw_keys(seed_keys(seeds.astype(np.uint64)), positions)


@pytest.mark.parametrize("fields", [{}, *FIELDS], ids=str)
@pytest.mark.parametrize("changes", ["seed", "position", "both"])
def test_draws_follow_the_distribution(changes: str, fields: dict[str, Any]) -> None:
    logits = random_logits(1, 1000, scale=1.5)
    params = draw_params(DRAWS, 1000, keys=keys_of(changes), **fields)
    tokens = choose_tokens(logits.expand(DRAWS, -1), params)
    assert chi_square_excess(tokens, logits, **fields) < 4


@pytest.mark.parametrize("changes", ["seed", "position", "both"])
def test_successive_draws_are_independent(changes: str) -> None:
    logits = random_logits(1, 30)
    tokens = choose_tokens(logits.expand(DRAWS, -1), draw_params(DRAWS, 30, keys=keys_of(changes)))
    pairs = (logits[:, :, None] + logits[:, None, :]).flatten(1)
    assert chi_square_excess(tokens[::2] * 30 + tokens[1::2], pairs) < 4
