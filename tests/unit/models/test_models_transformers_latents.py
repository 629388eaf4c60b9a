"""Models with latents (multi-head latent attention): their KV cache, its proof by trial, and adapters."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.models import transformers_decoder
from octavo_engine.models.model import Model
from octavo_engine.models.registry import complete_config
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner.adapters import Adapters
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.adapter_files import write_adapter
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import WHOLE, all_logits, expected_logits
from octavo_testing.ranks import load_part
from octavo_testing.tiny_models import make_tiny
from octavo_testing.transformers_ranks import planned_part
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

Expansion = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
NAME = "model.layers.0.self_attn.kv_b_proj"
OWN: Expansion = DeepseekV3Attention.expand_kv


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_cache_of_each_rank_has_the_latents(family: str, size: int) -> None:
    part = planned_part(family, size - 1, size)
    assert {(spec.num_kv_heads, spec.head_dim) for spec in part.kv_specs()} == {(1, 24 + 8)}
    assert {spec.num_heads for spec in part.specs} == {4 // size}  # type: ignore[attr-defined]
    assert part.named_shapes()[f"{NAME}.weight"] == (4 * (16 + 12), 24)
    assert not [name for name, _ in part.named_modules() if name.endswith("kv_b_proj")]


@pytest.mark.parametrize("ranks", [1, 16])
def test_the_plan_of_deepseek_v3_counts_latents(ranks: int) -> None:
    hf = DeepseekV3Config(num_hidden_layers=3, n_routed_experts=8).to_dict()
    files = ModelFiles(
        name="m", root=Path(), load_format="dummy", config=hf | {"architectures": ["DeepseekV3ForCausalLM"]}
    )
    config = EngineConfig(model="m", max_model_len=64, num_gpu_blocks_override=8, dtype="bfloat16")
    model = complete_config(load_model_config(files), "auto")
    plan = plan_memory(config, CpuDevice(), model, group=Group(0, ranks))
    values = plan.model.bytes_per_block / (3 * config.block_size * torch.bfloat16.itemsize)
    assert values == 2 * (512 + 64)


def values_before_keys(attention: Any, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    k, v = OWN(attention, latents, rope)
    return torch.cat((k[..., 4:16], v[..., :4], k[..., 16:]), -1), torch.cat((v[..., 4:], k[..., :4]), -1)


def values_of_another_head(attention: Any, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    k, v = OWN(attention, latents, rope)
    return k, v.roll(1, 1)


def keys_that_are_not_linear(attention: Any, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    k, v = OWN(attention, latents, rope)
    return torch.cat((k[..., :16].tanh(), k[..., 16:]), -1), v


@pytest.mark.parametrize("expand", [values_before_keys, values_of_another_head, keys_that_are_not_linear])
def test_latents_that_fail_their_trial_are_expanded(
    expand: Expansion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", expand)
    folder = make_tiny("deepseek_v3", tmp_path)
    tokens, expected = expected_logits(folder)
    with caplog.at_level(logging.INFO):
        model = load_part(resolve_model(str(folder)), Group(), impl="transformers")
    assert {(spec.num_kv_heads, spec.head_dim) for spec in model.kv_specs()} == {(4, 16 + 8)}
    assert (all_logits(PagedDriver(model), tokens, WHOLE) - expected).abs().max() < 1e-4
    (line,) = (each for each in caplog.messages if "is run by transformers" in each)
    assert "the keys and values of all heads: latents failed the trial of model.layers.0.self_attn: " in line


@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3"])
def test_latents_in_bf16_are_as_exact_as_expanded_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V2 scales its scores by YaRN."""
    folder = make_tiny(family, tmp_path)
    tokens, expected = expected_logits(folder)

    def error() -> float:
        model: Model = load_part(resolve_model(str(folder)), Group(), impl="transformers", dtype=torch.bfloat16)
        return float((all_logits(PagedDriver(model), tokens, WHOLE) - expected).square().mean().sqrt())

    of_latents = error()
    monkeypatch.setattr(transformers_decoder, "find_latents", lambda *_: "")
    assert 0 < of_latents < 1.2 * error()


def test_an_adapter_of_the_expansion_is_refused_by_name(tmp_path: Path) -> None:
    model = load_part(resolve_model(str(make_tiny("deepseek_v3", tmp_path))), Group(), impl="transformers")
    folder = write_adapter(tmp_path / "a", {NAME: (torch.ones(4, 24), torch.ones(112, 4))})
    with pytest.raises(
        StartupError, match=rf"the module '{NAME}', but adapters of this model can change only .*o_proj"
    ):
        Adapters(model, max_rank=8).load(str(folder))
