"""Rank 0 stops loading when another rank has failed."""

from pathlib import Path

import pytest
import torch
from octavo_engine.devices.memory import HostMemory
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.runner.load import load
from octavo_engine.runner.rank_plans import RankPlans
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import StepPlan
from octavo_testing.tiny_models import make_tiny


class FailingRank:
    """Another rank, which fails after so many checks."""

    def __init__(self, num_checks: int) -> None:
        self.num_checks = num_checks

    def launch(self, config: EngineConfig, files: ModelFiles, own: HostMemory) -> list[HostMemory]:
        return [own]

    def start(self, files: ModelFiles, plans: RankPlans, gpu: torch.device | None) -> tuple[Group, Stages]:
        return Group(0, 2), Stages()

    def check(self) -> None:
        self.num_checks -= 1
        if self.num_checks < 0:
            raise StartupError("rank 1: it has failed.")

    def wait_ready(self) -> int:
        raise AssertionError("rank 0 has loaded its part to the end")

    def run(self, plans: list[StepPlan]) -> None:
        raise AssertionError("rank 0 has loaded its part to the end")


@pytest.mark.parametrize("num_checks", [1, 50], ids=["tensors", "layers"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_rank_0_stops_loading_when_another_rank_has_failed(tmp_path: Path, num_checks: int, load_format: str) -> None:
    folder = make_tiny("llama", tmp_path)
    config = EngineConfig(
        model=str(folder),
        load_format=load_format,  # type: ignore[arg-type]
        dtype="float32",
        tensor_parallel_size=2,
        num_threads=2,
        num_gpu_blocks_override=8,
        max_model_len=64,
    )
    rank = FailingRank(num_checks)
    with pytest.raises(StartupError, match="rank 1: it has failed"):
        load(config, other_ranks=rank)
    assert rank.num_checks == -1
