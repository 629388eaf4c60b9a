"""Models that cannot be split over the ranks are refused before their weights are allocated."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.mlp import gated_mlp
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.group import Group
from octavo_engine.ops.native_blocks import BLOCK_FORMATS
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import make_tiny


def built(name: str, tmp_path: Any, size: int, **settings: Any) -> Model:
    config = load_model_config(resolve_model(str(make_tiny(name, tmp_path))))
    settings = {"dtype": torch.float32, "max_model_len": 32} | settings
    return build_model(config, device="meta", group=Group(0, size), **settings)


def test_more_ranks_than_kv_heads_are_refused(tmp_path: Any) -> None:
    with pytest.raises(StartupError, match=r"--tensor-parallel-size 3 exceeds the 2 KV heads .*use at most 2"):
        built("llama", tmp_path, 3)


@pytest.mark.parametrize(("name", "impl"), [("gpt2", "auto"), ("opt", "octavo"), ("llama", "transformers")])
def test_models_without_split_layers_are_refused(name: str, impl: str, tmp_path: Any) -> None:
    with pytest.raises(StartupError, match=r"--tensor-parallel-size 2 is not supported where .*LlamaForCausalLM"):
        built(name, tmp_path, 2, impl=impl)
    built(name, tmp_path, 1, impl=impl)


def test_fewer_blocks_than_ranks_are_refused() -> None:
    build = BuildContext(
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        max_model_len=8,
        block_formats={"mlp.down_proj.weight": BLOCK_FORMATS["Q4_K"]},
        group=Group(0, 3),
    )
    names = ("gate_proj", "up_proj", "down_proj")
    with pytest.raises(StartupError, match=r"'mlp.down_proj.weight': its 512 inputs are 2 Q4_K blocks.*use at most 2"):
        gated_mlp("mlp", 64, 512, names, "silu", build)
    gated_mlp("mlp", 64, 512, names, "silu", replace(build, group=Group(0, 2)))
