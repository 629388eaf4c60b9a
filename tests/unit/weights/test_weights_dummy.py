"""Dummy weights: equal for equal names, with a spread that gives varied logits, and fast."""

import torch
from octavo_engine.weights.dummy import POOL_SIZE, dummy_weights

SHAPES = [("model.embed_tokens.weight", (1000, 64)), ("model.norm.weight", (64,)), ("q.bias", (32,)), ("x", (7, 3))]


def test_values_do_not_depend_on_other_weights() -> None:
    all_at_once = dict(dummy_weights(SHAPES))
    for name, shape in SHAPES:
        [(_, alone)] = dummy_weights([(name, shape)])
        assert alone.shape == shape
        assert torch.equal(alone, all_at_once[name])


def test_seeds_and_names_give_different_values() -> None:
    [(_, a), (_, b)] = dummy_weights([("a", (8, 8)), ("b", (8, 8))])
    [(_, c)] = dummy_weights([("a", (8, 8))], seed=1)
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_normalised_state_gives_spread_logits() -> None:
    weights = dict(dummy_weights([("lm_head.weight", (5000, 256))]))
    state = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))
    logits = (state / state.pow(2).mean(-1, keepdim=True).sqrt()) @ weights["lm_head.weight"].t()
    assert 1.5 < logits.std() < 2.5


def test_norms_are_near_one_and_dtype_is_kept() -> None:
    [(_, norm)] = dummy_weights([("n.weight", (4096,))], dtype=torch.bfloat16)
    assert norm.dtype == torch.bfloat16
    assert abs(norm.float().mean() - 1) < 0.02


def test_a_tensor_larger_than_the_pool_wraps_around() -> None:
    [(_, big)] = dummy_weights([("w", (3, POOL_SIZE))])
    assert torch.equal(big[0], big[2])
    assert big[0].std() > 0
