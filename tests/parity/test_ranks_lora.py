"""Adapters of models whose layers are split over ranks: log-probabilities equal those of transformers with peft."""

from pathlib import Path

import pytest
import torch
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner.adapters import Adapters
from octavo_engine.sources.resolve import resolve_model
from octavo_testing.lora_adapters import TARGETS, PeftOracle, make_adapter
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import WHOLE, all_logits
from octavo_testing.ranks import load_part, run_ranks
from octavo_testing.tiny_models import LENGTH, VOCAB, make_tiny
from torch import Tensor

TOLERANCE = 1e-4
MUTANT_DISTANCE = 1e-2
FAST = ("llama", "gpt2")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(TARGETS)]


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_two_and_four_ranks_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """The adapter changes every linear layer of attention and feed-forward, split along outputs or inputs."""
    files = resolve_model(str(make_tiny(name, tmp_path)))
    folder = make_adapter(name, tmp_path / "adapter", list(TARGETS[name]), rank=8, seed=1)
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    oracle = PeftOracle(name)

    def logprobs(group: Group, *, adapted: bool = True) -> Tensor:
        model = load_part(files, group)
        adapters = Adapters(model, max_rank=8)
        rows = {adapters.load(str(folder)): slice(None)} if adapted else {}
        with adapters.applied(rows):
            return all_logits(PagedDriver(model), tokens, WHOLE).log_softmax(-1)

    expected = torch.stack([oracle.logprobs(folder, sequence.tolist()) for sequence in tokens])
    for size in (2, 4):
        found = run_ranks(size, logprobs)[0]
        assert (found - expected).abs().max() <= TOLERANCE
    base = run_ranks(2, lambda group: logprobs(group, adapted=False))[0]
    assert (base - expected).abs().max() > MUTANT_DISTANCE
