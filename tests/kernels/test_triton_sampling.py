"""The sampling kernel, in the interpreter, against the CPU's: equal tokens for equal logits, but for near ties."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from octavo_engine.ops.triton import sampling
from octavo_engine.sampling.draws import kept_tokens
from octavo_testing.draw_cases import FILTERS, draw_params, near_ties, random_logits

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "sampling.md").read_text()
PUBLISHED = re.findall(r"^\| tokens \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
SIZES = {1: 1, 1000: 2, 2500: 1}  # rows by vocabulary: less than a tile, and more


def kernel(logits: torch.Tensor, params: Any) -> torch.Tensor:
    return sampling.sample(logits, torch.from_numpy(params.view(np.int32).reshape(-1, 8)))


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_equal_the_cpus(name: str) -> None:
    for (vocab, rows), scale in zip(SIZES.items(), (2.0, 3.0, 0.1), strict=True):
        logits = random_logits(rows, vocab, seed=vocab, scale=scale)
        assert near_ties(logits, draw_params(rows, vocab, **FILTERS[name]), kernel) == 0


@pytest.mark.parametrize(("given", "value"), PUBLISHED)
def test_published_tokens(given: str, value: str) -> None:
    fields = {name: float(number) for name, number in re.findall(r"`(\w+)` ([\d.]+)", given)}
    fields |= {"top_k": int(fields.get("top_k", 0))}
    logits = torch.tensor([[i * 7919 % 1000 / 64 for i in range(1000)]])
    parts = [draw_params(1, 1000, seed=5, position=i, **fields) for i in range(8)]
    assert " ".join(str(kernel(logits, params).item()) for params in parts) == value


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_maximum_gets_no_token(temperature: float) -> None:
    logits = random_logits(6, 3000)
    logits[0, 2999] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    logits[4, [7, 2900]] = 50.0
    tokens = kernel(logits, draw_params(6, 3000, temperature=temperature, top_k=2, top_p=0.9)).tolist()
    assert tokens[:4] == [-1, -1, -1, 0]
    assert tokens[4] == 7 if temperature == 0 else tokens[4] in (7, 2900)


@pytest.mark.parametrize("fields", [{"top_k": 4}, {"top_p": 0.35}], ids=str)
def test_equals_of_the_last_kept_token_are_kept(fields: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.6, 3.0, 2.6, 2.8, 2.6]]).expand(8, -1).contiguous()
    params = draw_params(8, 7, seed=20, **fields)
    assert near_ties(logits, params, kernel) == 0
    kept = kept_tokens(logits, params)[0].nonzero()[:, 0].tolist()
    assert kept == ([1, 2, 3, 4, 5, 6] if "top_k" in fields else [1, 3])


def test_zeros_of_either_sign_are_equal() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, -0.0]]).expand(12, -1).contiguous()
    assert set(kernel(logits, draw_params(12, 4, top_k=2)).tolist()) == {0, 1, 3}


def test_a_row_does_not_depend_on_others_or_on_its_stride() -> None:
    logits = random_logits(3, 800)
    params = draw_params(3, 500, temperature=0.9, top_p=0.9)
    together = kernel(logits[:, :500], params)
    for row in range(3):
        alone = kernel(logits[row : row + 1, :500].contiguous(), params[row : row + 1])
        assert alone.tolist() == together[row : row + 1].tolist()
