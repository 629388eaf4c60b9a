"""Models that cannot be split over the ranks are refused before their weights are allocated."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from octavo_engine.layers.attention_heads import rank_heads
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.mlp import gated_mlp
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS
from octavo_engine.ops.rank_group import Group
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import make_tiny


def build_context(group: Group, **settings: Any) -> BuildContext:
    return BuildContext(dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=8, group=group, **settings)


def built(name: str, tmp_path: Any, size: int, **settings: Any) -> Model:
    config = load_model_config(resolve_model(str(make_tiny(name, tmp_path))))
    settings = {"dtype": torch.float32, "max_model_len": 32} | settings
    return build_model(config, device="meta", group=Group(0, size), **settings)


@pytest.mark.parametrize(
    ("name", "num_ranks", "remedy"),
    [("llama", 3, "2 KV heads .*: use at most 2, or 4.$"), ("gpt2", 5, "4 KV heads .*: use at most 4.$")],
)
def test_heads_that_the_ranks_cannot_divide_are_refused(name: str, num_ranks: int, remedy: str, tmp_path: Any) -> None:
    with pytest.raises(StartupError, match=f"--tensor-parallel-size {num_ranks} cannot divide the 4 .*{remedy}"):
        built(name, tmp_path, num_ranks)


HEADS = [  # query heads, KV heads, ranks: query heads and KV heads of each rank
    ((9, 3, 2), ["0 1 2: 0", "3 4 5 6 7 8: 1 2"]),
    ((4, 2, 4), ["0: 0", "1: 0", "2: 1", "3: 1"]),
    ((6, 2, 4), ["0: 0", "1 2: 0", "3: 1", "4 5: 1"]),
    ((4, 1, 3), ["0: 0", "1: 0", "2 3: 0"]),
]


@pytest.mark.parametrize(("sizes", "expected"), HEADS)
def test_ranks_hold_each_query_head_once_and_its_kv_head(sizes: tuple[int, int, int], expected: list[str]) -> None:
    num_heads, num_kv_heads, num_ranks = sizes
    contexts = [build_context(Group(rank, num_ranks)) for rank in range(num_ranks)]
    shares = [rank_heads("o", num_heads, num_kv_heads, 16, context) for context in contexts]
    found = [f"{' '.join(map(str, share.queries))}: {' '.join(map(str, share.keys))}" for share in shares]
    assert found == expected
    assert {share.copies for share in shares} == {max(1, num_ranks // num_kv_heads)}


def test_copied_kv_heads_take_memory_on_each_rank(tmp_path: Any) -> None:
    specs = [built("llama", tmp_path, num_ranks).kv_specs()[0] for num_ranks in (1, 2, 4)]
    assert [spec.num_kv_heads for spec in specs] == [2, 1, 1]


@pytest.mark.parametrize(("num_kv_heads", "sizes"), [(8, "1, 2"), (2, "1, 2, 6")])
def test_heads_that_cut_blocks_are_refused(num_kv_heads: int, sizes: str) -> None:
    """24 heads of 64 values, four of which are a block of 256."""
    formats = {"o.weight": QUANTISED_FORMATS["Q4_K"]}
    context = build_context(Group(0, 8), block_formats=formats)
    with pytest.raises(StartupError, match=rf"'o.weight'.*Q4_K blocks of 256.*use one of {sizes}, or"):
        rank_heads("o.weight", 24, num_kv_heads, 64, context)
    rank_heads("o.weight", 24, num_kv_heads, 64, build_context(Group(0, 2), block_formats=formats))


def test_fewer_blocks_than_ranks_are_refused() -> None:
    build = build_context(Group(0, 3), block_formats={"mlp.down_proj.weight": QUANTISED_FORMATS["Q4_K"]})
    names = ("gate_proj", "up_proj", "down_proj")
    with pytest.raises(StartupError, match=r"'mlp.down_proj.weight': its 512 inputs are 2 Q4_K blocks.*use at most 2"):
        gated_mlp("mlp", 64, 512, names, "silu", build)
    gated_mlp("mlp", 64, 512, names, "silu", replace(build, group=Group(0, 2)))
