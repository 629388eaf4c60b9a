"""Parts of tiny models that transformers runs: planned without memory, or run on a thread for each rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.rank_group import Group
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, all_logits
from octavo_testing.ranks import load_part, run_ranks
from octavo_testing.tiny_models import FAMILIES, tiny_config


def logits_of_ranks(files: ModelFiles, tokens: Tensor, size: int) -> Tensor:
    """Return the logits that rank 0 gathers; all other ranks have none."""

    def run(group: Group) -> Tensor:
        model = load_part(files, group, impl="transformers")
        backend = CpuBackend(model.kv_specs(), BLOCK, torch.float32)
        return all_logits(PagedDriver(model, block_size=BLOCK, backend=backend), tokens, FEEDS["chunks_at_block_edges"])

    logits = run_ranks(size, run)
    assert all(each.shape[-1] == 0 for each in logits[1:])
    return logits[0]


def change_sizes(monkeypatch: pytest.MonkeyPatch, name: str, sizes: dict[str, Any]) -> None:
    tiny = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, replace(tiny, config=tiny.config | sizes))


def config_of(name: str) -> ModelConfig:
    config = tiny_config(name)
    hf = config.to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}
    return load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf))


def planned_part(name: str, rank: int, size: int) -> Model:
    """Return a rank's part of a model without memory."""
    group = Group(rank, size)
    return build_model(
        config_of(name), impl="transformers", dtype=torch.float32, device="meta", max_model_len=64, group=group
    )
