"""Logits of models whose layers are split over ranks equal transformers', and those of one rank.

Each rank is a thread with its own part of the weights and of the KV cache. Rank 0 gathers the logits.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS, kernels_expand_blocks
from octavo_engine.ops.rank_group import Group
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, WHOLE, all_logits, expected_logits
from octavo_testing.ranks import load_part, run_ranks
from octavo_testing.tiny_models import LENGTH, TINY, make_tiny
from torch import Tensor

TOLERANCE = 1e-4
MUTANT_DISTANCE = 1e-3
#: Models that differ in the layers that are split; the others differ in rotary positions and windows.
FAST = ("llama_biased_tied", "qwen3", "gemma2", "phi3", "qwen2_moe", "olmoe", "opt_350m", "gpt2")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TINY]
Feed = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Case:
    name: str
    files: ModelFiles
    tokens: Tensor  # [2, LENGTH]
    expected: Tensor  # [2, LENGTH, vocab]

    def distance(self, feed: Feed, size: int = 2) -> float:
        """Return max |Δlogit| of `size` ranks."""
        logits = run_ranks(size, lambda group: self.logits(group, feed))
        assert all(each.shape[-1] == 0 for each in logits[1:])
        return (logits[0] - self.expected).abs().max().item()

    def logits(self, group: Group, feed: Feed) -> Tensor:
        model = load_part(self.files, group, max_model_len=TINY[self.name].max_model_len)
        backend = CpuBackend(model.kv_specs(), BLOCK, torch.float32)
        return all_logits(PagedDriver(model, block_size=BLOCK, backend=backend), self.tokens, feed)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    tokens, expected = expected_logits(folder)
    return Case(request.param, resolve_model(str(folder)), tokens, expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_logits_of_ranks_equal_transformers(case: Case, num_ranks: int) -> None:
    """Models have two KV heads, so that four ranks copy them; OPT and GPT-2 have four."""
    assert case.distance(FEEDS["chunks_at_block_edges"], num_ranks) <= TOLERANCE


def test_without_an_all_reduce_the_logits_differ(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "all_reduce", lambda group, x: x)
    assert case.distance(WHOLE) > MUTANT_DISTANCE


UNEVEN = {"num_attention_heads": 6, "hidden_size": 96}


@pytest.mark.parametrize(
    ("name", "num_kv_heads", "num_ranks"), [("llama", 1, 4), pytest.param("olmoe", 2, 4, marks=pytest.mark.slow)]
)
def test_ranks_with_uneven_query_heads_of_copied_kv_heads(
    name: str, num_kv_heads: int, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have one or two of a KV head's query heads. OLMoE norms all heads together."""
    config = TINY[name].config | UNEVEN | {"num_key_value_heads": num_kv_heads}
    monkeypatch.setitem(TINY, name, replace(TINY[name], config=config))
    folder = make_tiny(name, tmp_path)
    case = Case(name, resolve_model(str(folder)), *expected_logits(folder))
    assert case.distance(FEEDS["chunks_at_block_edges"], num_ranks) <= TOLERANCE


QUANTISED = [("llama_biased_tied", "Q8_0"), ("phi3", "Q4_1"), ("qwen2_moe", "Q8_0")]


@pytest.mark.skipif(not kernels_expand_blocks(torch.bfloat16), reason="the kernels are not available")
@pytest.mark.parametrize(("name", "block_format"), QUANTISED)
def test_weights_that_are_quantised_while_they_load_are_those_of_one_rank(
    name: str, block_format: str, tmp_path: Path
) -> None:
    """Partial sums are rounded to bf16, which changes logits less than other blocks would."""
    files, tokens = resolve_model(str(make_tiny(name, tmp_path))), torch.arange(3, 3 + LENGTH).expand(2, -1)

    def logits(group: Group, **build: Any) -> Tensor:
        model = load_part(files, group, **build)
        return all_logits(PagedDriver(model), tokens, WHOLE)

    quantised = {"dtype": torch.bfloat16, "quantise_to": QUANTISED_FORMATS[block_format]}
    one, exact = logits(Group(), **quantised), logits(Group())
    two = run_ranks(2, lambda group: logits(group, **quantised))[0]
    rounded = (logits(Group(), dtype=torch.bfloat16) - exact).square().mean().sqrt()
    assert (two - one).square().mean().sqrt() <= 1.5 * rounded
