"""Logits of models whose layers are divided among pipeline stages equal transformers', and have the bits of one stage.

Each rank is a thread with its own weights and KV cache. The first stage gets the final rows and has the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from octavo_engine.models.model import Inputs, Model, Positions
from octavo_engine.ops.attention import ForwardContext
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, all_logits, expected_logits
from octavo_testing.ranks import load_part, run_stages
from octavo_testing.tiny_models import TINY, make_tiny
from torch import Tensor

TOLERANCE = 1e-4
FAST = ("llama_biased_tied", "gemma2", "olmoe", "opt_350m", "gpt2")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TINY]


class StageDriver(PagedDriver):
    """A driver of one stage, which makes logits on the first stage only."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, block_size=BLOCK, backend=CpuBackend(model.kv_specs(), BLOCK, model.build.dtype))

    def run_model(self, inputs: Inputs, positions: Positions, ctx: ForwardContext) -> Tensor:
        rows = np.arange(len(positions))
        return self.model.build.stages.return_rows(super().run_model(inputs, positions, ctx), lambda: rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) if self.model.build.stages.is_first else hidden[:, :0]


@dataclass(frozen=True)
class Case:
    name: str
    files: ModelFiles
    tokens: Tensor  # [2, LENGTH]
    expected: Tensor  # [2, LENGTH, vocab]

    def logits(self, num_layers: Sequence[int], ranks_per_stage: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the logits of rank 0 of stages with these numbers of layers."""

        def run(group: Group, stages: Stages) -> Tensor:
            longest = TINY[self.name].max_model_len
            model = load_part(self.files, group, stages=stages, max_model_len=longest, dtype=dtype)
            return all_logits(StageDriver(model), self.tokens, FEEDS["chunks_at_block_edges"])

        found = run_stages(num_layers, ranks_per_stage, run)
        assert all(each.shape[-1] == 0 for each in found[1:])
        return found[0]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    tokens, expected = expected_logits(folder)
    return Case(request.param, resolve_model(str(folder)), tokens, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stages_have_the_bits_of_one_and_equal_transformers(case: Case, dtype: torch.dtype) -> None:
    """In bfloat16, a residual to which a stage has added its last update would be rounded otherwise."""
    num_layers = load_model_config(case.files).num_layers
    one = case.logits([num_layers], dtype=dtype)
    assert dtype == torch.bfloat16 or (one - case.expected).abs().max() <= TOLERANCE
    for layers in ([1, num_layers - 1], [1, num_layers - 2, 1]):
        if 0 not in layers:
            assert torch.equal(case.logits(layers, dtype=dtype), one)


def test_two_stages_of_two_ranks_equal_transformers(case: Case) -> None:
    num_layers = load_model_config(case.files).num_layers
    assert (case.logits([num_layers - 1, 1], 2) - case.expected).abs().max() <= TOLERANCE
