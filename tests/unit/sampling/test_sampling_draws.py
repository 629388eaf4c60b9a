"""The draw against its published vectors, transformers' filters and the distribution that it promises."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from octavo_engine.sampling.draws import (
    choose_tokens,
    choose_tokens_reference,
    draw_keys,
    gumbel_noise,
    kept_tokens,
    seed_keys,
    token_weights,
)
from octavo_testing.draw_cases import chi_square_excess, draw_params, random_logits, same_kept_tokens
from torch import Tensor

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "sampling.md").read_text()
VECTORS = re.findall(r"^\| (key|noise|weight|tokens) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
PUBLISHED_LOGITS = torch.tensor([[i * 7919 % 1000 / 64 for i in range(1000)]])
CPU = torch.device("cpu")


def published(kind: str) -> list[tuple[str, str]]:
    return [(given, value) for found, given, value in VECTORS if found == kind]


def test_the_page_has_vectors_of_each_kind() -> None:
    assert {kind: len(published(kind)) for kind in ("key", "noise", "weight", "tokens")} == {
        "key": 4, "noise": 4, "weight": 6, "tokens": 6,
    }  # fmt: skip


@pytest.mark.parametrize(("given", "value"), published("key"))
def test_published_keys(given: str, value: str) -> None:
    seed, position = map(int, re.findall(r"\d+", given))
    (key,) = draw_keys(seed_keys(np.array([seed], dtype=np.uint64)), np.array([position]))
    assert f"`{key:016x}`" == value


def bits_of(key: int, token: int) -> int:
    """Compute the noise's bits as the page defines them, in Python's integers."""
    b = (token * 0x9E3779B9 + key) % 2**32
    b = (b ^ b >> 16) * 0x7FEB352D % 2**32
    b = (b ^ b >> 15 ^ key >> 32) * 0x846CA68B % 2**32
    return b ^ b >> 16


@pytest.mark.parametrize(("given", "value"), published("noise"))
def test_published_noise(given: str, value: str) -> None:
    key, token = re.findall(r"`(\w+)`, token (\d+)", given)[0]
    bits = bits_of(int(key, 16), int(token))
    noise = np.float32(-math.log(-math.log((bits + 0.5) / 2**32)))
    assert value == f"bits `{bits:08x}`, {noise!s}"
    computed = gumbel_noise(np.array([int(key, 16)], dtype=np.uint64), int(token) + 1, CPU)
    assert computed[0, -1].item() == noise


@pytest.mark.parametrize(("given", "value"), published("weight"))
def test_published_weights(given: str, value: str) -> None:
    """Round after each operation, as the page says: numpy's fp32 scalars do."""
    one = np.float32
    t = max(one(float(given.split()[-1])) * one(1.44269504), one(-60))
    n = np.round(t)
    p, f = one(0.0013264727), t - n
    for coefficient in (0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0):
        p = p * f + one(coefficient)
    assert int(np.round(float(p) * 2.0 ** float(n + 34))) == int(value)
    assert token_weights(torch.tensor([[float(given.split()[-1])]])).item() == int(value)


@pytest.mark.parametrize("choose", [choose_tokens, choose_tokens_reference])
@pytest.mark.parametrize(("given", "value"), published("tokens"))
def test_published_tokens(given: str, value: str, choose: Any) -> None:
    fields = {name: float(number) for name, number in re.findall(r"`(\w+)` ([\d.]+)", given)}
    fields |= {"top_k": int(fields.get("top_k", 0))}
    parts = [draw_params(1, 1000, seed=5, position=i, **fields) for i in range(8)]
    assert " ".join(str(choose(PUBLISHED_LOGITS, params).item()) for params in parts) == value


WARPED = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.7, "min_p": 0.01, "top_k": 40, "top_p": 0.8}]


@pytest.mark.parametrize("fields", WARPED, ids=str)
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_kept_tokens_are_those_of_transformers(fields: dict[str, Any], scale: float) -> None:
    assert same_kept_tokens(random_logits(50, 1024, scale=scale), **fields) == 50


def test_equals_of_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 1.0, 2.0, 1.0]])
    cases = (({"top_k": 4}, {*range(1, 7)}), ({"top_p": 0.6}, {1, 3}), ({"top_p": 0.9}, {*range(1, 7)}))
    for fields, kept in cases:
        assert set(kept_tokens(logits, draw_params(1, 7, **fields))[0].nonzero()[:, 0].tolist()) == kept, fields


def small_logits() -> Tensor:
    return random_logits(1, 40, seed=1)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6}, {"top_k": 12, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("choose", [choose_tokens, choose_tokens_reference])
def test_draws_of_neighbouring_seeds_follow_the_distribution(fields: dict[str, Any], choose: Any) -> None:
    draws = 20_000
    tokens = choose(small_logits().expand(draws, -1), draw_params(draws, 40, **fields))
    assert chi_square_excess(tokens, small_logits(), **fields) < 4


def test_draws_of_neighbouring_positions_follow_the_distribution() -> None:
    draws = 20_000
    keys = draw_keys(seed_keys(np.full(draws, 3, dtype=np.uint64)), np.arange(draws))
    tokens = choose_tokens(small_logits().expand(draws, -1), draw_params(draws, 40, keys=keys))
    assert chi_square_excess(tokens, small_logits()) < 4


def test_noise_of_neighbouring_tokens_is_independent() -> None:
    noise = gumbel_noise(draw_params(200, 1)["key"], 5000, CPU).double()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    centred = noise - noise.mean()
    for other in (centred.roll(1, 1), centred.roll(1, 0), centred.roll(16, 1)):
        assert abs(float((centred * other).mean())) < 0.01
