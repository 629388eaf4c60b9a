"""Layers are divided among stages by bytes or by a variable; what stages don't support ends a start before it loads."""

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.devices.device import CpuDevice
from octavo_engine.ops.stages import split_layers
from octavo_engine.runner.rank_plans import RankPlans, plan_ranks
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import LAYERS, make_tiny


def largest(layer_bytes: list[int], first_bytes: int, counts: tuple[int, ...]) -> int:
    bounds = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    sizes = [sum(layer_bytes[start:end]) for start, end in pairwise(bounds)]
    return max(sizes[0] + first_bytes, *sizes)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 60), st.data())
def test_no_other_split_has_a_smaller_largest_stage(layer_bytes: list[int], first: int, data: st.DataObject) -> None:
    num_layers = len(layer_bytes)
    num_stages = data.draw(st.integers(1, num_layers))
    counts = split_layers(layer_bytes, first, num_stages)
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    others = [
        tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]
    assert largest(layer_bytes, first, counts) == min(largest(layer_bytes, first, other) for other in others)


def plans(folder: Path, stages: int, tensor: int = 1, device: CpuDevice | None = None, **settings: Any) -> RankPlans:
    config = EngineConfig(
        model=str(folder),
        pipeline_parallel_size=stages,
        tensor_parallel_size=tensor,
        max_model_len=64,
        **{"num_gpu_blocks_override": 8, "dtype": "float32"} | settings,
    )
    return plan_ranks(config, device or CpuDevice(), load_model_config(resolve_model(config.model)))


@pytest.mark.parametrize("name", ["llama", "llama_biased_tied", "gpt2", "opt_350m", "olmoe"])
def test_stages_have_the_weights_and_the_cache_of_one(name: str, tmp_path: Path) -> None:
    """Except for the rotary tables, which each stage has."""
    folder = make_tiny(name, tmp_path)
    (one,), two = plans(folder, 1).ranks, plans(folder, 2).ranks
    assert sum(each.model.bytes_per_block for each in two) == one.model.bytes_per_block
    assert sum(each.model.weights_bytes for each in two) == pytest.approx(one.model.weights_bytes, rel=0.02)
    assert [each.kv.num_blocks for each in two] == [8, 8]


def test_blocks_are_those_of_the_stage_with_the_fewest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1, 3")
    made = plans(make_tiny("llama", tmp_path), 2, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 20)
    sizes = [each.model.bytes_per_block for each in made.ranks]
    assert made.num_layers == (1, 3)
    assert sizes[1] == 3 * sizes[0]
    assert [each.kv.num_blocks for each in made.ranks] == [(1 << 20) // sizes[1]] * 2


def test_ranks_of_a_stage_divide_its_layers(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    sizes = [rank.model.bytes_per_block for rank in plans(folder, 2, tensor=2).ranks]
    (one,), two = (plans(folder, stages).ranks for stages in (1, 2))
    assert sum(sizes) == one.model.bytes_per_block
    assert [sizes[0] + sizes[1], sizes[2] + sizes[3]] == [each.model.bytes_per_block for each in two]


@pytest.mark.parametrize("value", ["4", "2,1", "0,4", "4,0", "2,2,0", "1,1,2", "a,b", "2,,2", "-1,5", ",", "²,2"])
def test_a_partition_that_is_no_division_is_refused(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", value)
    with pytest.raises(StartupError, match=f"^VLLM_PP_LAYER_PARTITION={value}: .* 2 numbers.* 4 layers.*correct it"):
        plans(make_tiny("llama", tmp_path), 2)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    assert len(plans(folder, LAYERS).ranks) == LAYERS
    with pytest.raises(
        StartupError, match=f"^--pipeline-parallel-size 5 exceeds the {LAYERS} layers.*at most {LAYERS}"
    ):
        plans(folder, LAYERS + 1)


def test_models_that_transformers_runs_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    with pytest.raises(StartupError, match=r"^--pipeline-parallel-size 3 is not supported where .*use 1, or"):
        plans(folder, 3, model_impl="transformers")


def test_gpus_are_refused(tmp_path: Path) -> None:
    gpu = CpuDevice()
    gpu.name = "cuda"
    with pytest.raises(StartupError, match=r"^--pipeline-parallel-size 2 is supported on a CPU only.*--device cpu"):
        plans(make_tiny("llama", tmp_path), 2, device=gpu)
