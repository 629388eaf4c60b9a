"""The modules that adapters may change, the memory that is reserved for them, and models and devices without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.models.registry import build_model
from octavo_engine.ops.packed_linear import PackedWeight
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner.capacity import plan_capacity
from octavo_engine.runner.lora_terms import AdapterTargets, adapters_bytes, make_terms, read_tensors
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import LoRAModule
from octavo_engine.sources.adapter import read_adapter
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.tiny_models import make_tiny


class PlainDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.packs_weights = False


def model_of(folder: Path, **arguments: Any) -> Any:
    config = load_model_config(resolve_model(str(folder)))
    return build_model(config, **{"dtype": torch.bfloat16, "device": "meta", "max_model_len": 64, **arguments})


def names_of(folder: Path) -> set[str]:
    targets = AdapterTargets(model_of(folder))
    return {name.rpartition(".")[2] for linear in targets for name in linear.spec.names}


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", ATTENTION | {"gate_proj", "up_proj", "down_proj"}),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("mixtral", ATTENTION),
    ],
)
def test_targets_are_linear_layers_that_get_each_row(name: str, modules: set[str], tmp_path: Path) -> None:
    assert names_of(make_tiny(name, tmp_path)) == modules


def test_experts_and_routers_are_no_targets(tmp_path: Path) -> None:
    targets = AdapterTargets(model_of(make_tiny("qwen2_moe", tmp_path)))
    assert targets.of_module("model.layers.0.mlp.shared_expert.up_proj") is not None
    for name in ("experts.0.up_proj", "gate", "shared_expert_gate"):
        assert targets.of_module(f"model.layers.0.mlp.{name}") is None


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("rank", [1, 16, 24, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reserve_is_at_least_what_adapters_take(
    rank: int, dtype: torch.dtype, num_ranks: int, tmp_path: Path
) -> None:
    """`rank`: of the adapter. `num_ranks`: the processes that divide the model, and the adapter with it."""
    folder = make_tiny("llama", tmp_path)
    model = model_of(folder, device="cpu", dtype=dtype, group=Group(0, num_ranks))
    adapter = read_adapter(write_adapter(tmp_path / "a", llama_pairs(rank=rank)))
    terms = make_terms(adapter, read_tensors(adapter), model, max_rank=rank)
    packed = [
        weight for term in terms.values() for weight in (term.down, *(up[1] for up in term.ups if up is not None))
    ]
    config = EngineConfig(enable_lora=True, max_loras=3, max_lora_rank=rank)
    reserved = adapters_bytes(config, CpuDevice(), model)
    layers = model.config.num_layers / 2  # the adapter changes two of them
    assert 3 * layers * sum(map(bytes_of, packed)) <= reserved


def bytes_of(weight: PackedWeight) -> int:
    if weight.native is not None:
        return sum(each.nbytes for each in weight.native.owned if isinstance(each, torch.Tensor))
    return weight.out_features * weight.in_features * 4


def test_a_dry_run_reserves_room_and_reads_adapters(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": str(make_tiny("llama", tmp_path)), "num_threads": 1}
    without = plan_capacity(EngineConfig(**settings))
    assert without.adapters_bytes == 0
    sizes = [plan_capacity(EngineConfig(enable_lora=True, max_loras=n, **settings)).adapters_bytes for n in (1, 4)]
    assert 0 < 4 * sizes[0] == sizes[1]
    assert plan_capacity(EngineConfig(enable_lora=True, max_cpu_loras=4, **settings)).adapters_bytes == sizes[1]
    adapter = write_adapter(tmp_path / "a", llama_pairs(rank=17))
    modules = (LoRAModule(name="a", path=str(adapter)),)
    with pytest.raises(StartupError, match="rank 17"):
        plan_capacity(EngineConfig(enable_lora=True, lora_modules=modules, **settings))
    planned = plan_capacity(EngineConfig(enable_lora=True, lora_modules=modules, max_lora_rank=32, **settings))
    assert planned.weights_bytes == without.weights_bytes


def test_reserved_memory_counts(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": str(make_tiny("llama", tmp_path)), "num_threads": 1}
    with pytest.raises(StartupError, match="does not fit"):
        plan_capacity(
            EngineConfig(enable_lora=True, max_loras=1024, max_lora_rank=1024, gpu_memory_utilization=0.01, **settings)
        )


def test_targets_of_a_model_that_transformers_runs_have_the_names_of_its_modules(tmp_path: Path) -> None:
    targets = AdapterTargets(model_of(make_tiny("minimax_m2", tmp_path)))
    assert {linear.spec.names[0].rpartition(".")[2] for linear in targets} == ATTENTION
    assert targets.of_module("model.layers.3.self_attn.q_proj") is not None
    assert targets.of_module("layers.3.self_attn.q_proj") is not None  # of the bare model
    for name in ("block_sparse_moe.experts.0.w1", "mlp.gate", "self_attn.qkv_proj"):
        assert targets.of_module(f"model.layers.3.{name}") is None


def test_a_device_that_does_not_pack_weights_reserves_nothing_for_padding(tmp_path: Path) -> None:
    model = model_of(make_tiny("llama", tmp_path))
    config = EngineConfig(enable_lora=True, max_loras=1, max_lora_rank=3)
    specs = [linear.spec for linear in AdapterTargets(model)]
    values = sum(3 * (len(spec.names) * spec.in_features + sum(spec.outs)) for spec in specs)
    assert adapters_bytes(config, PlainDevice(), model) == 2 * values < adapters_bytes(config, CpuDevice(), model)
