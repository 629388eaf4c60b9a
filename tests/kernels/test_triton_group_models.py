"""Models whose experts stay in groups, by Triton's kernels in the interpreter: tokens are those of expanded ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.layers.moe import Experts
from octavo_engine.models.model import Model
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.group_tensor import GroupTensor
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.runner.model_loading import load_model
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import stored_tensors
from octavo_testing.group_weights import groups_kept
from octavo_testing.paged import PagedDriver
from octavo_testing.quantised_tiny import make_quantised
from octavo_testing.tiny_models import LENGTH, TINY, make_tiny
from octavo_testing.triton_device import triton_kernels
from torch import Tensor

pytestmark = pytest.mark.slow

BLOCK = 16
PROMPT = list(range(3, 15))


@pytest.fixture(autouse=True)
def _inner_size_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TINY["qwen3_moe"]
    monkeypatch.setitem(TINY, "qwen3_moe", replace(tiny, config={**tiny.config, "moe_intermediate_size": 64}))


def load(files: ModelFiles, quantization: str | None = None) -> tuple[Model, MemoryPlan]:
    config, device = load_model_config(files), CpuDevice()
    known = {"model": files.name, "dtype": "float16", "num_gpu_blocks_override": 20, "max_model_len": LENGTH}
    settings = EngineConfig(**known, quantization=quantization)
    plan = plan_memory(settings, device, config, stored_tensors(files))
    return load_model(device, files, config, plan), plan


def generate(model: Model, num_tokens: int) -> tuple[Tensor, list[int]]:
    """Return the logits of the prompt, and greedy tokens."""
    backend = CudaBackend(model.kv_specs(), BLOCK, torch.float16, "cpu", num_programs=5)
    driver = PagedDriver(model, block_size=BLOCK, backend=backend)
    logits = driver.feed({0: PROMPT})[0]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < num_tokens:
        tokens.append(int(driver.feed({0: tokens[-1:]}, last_only=True)[0].argmax()))
    return logits, tokens


def stacks_of(model: Model) -> list[Tensor | GroupTensor]:
    return [stack for each in model.modules() if isinstance(each, Experts) for stack in each.stacks]


@pytest.mark.parametrize(
    ("family", "method"),
    [("mixtral", "awq"), ("qwen3_moe", "awq"), ("olmoe", "gptq"), ("olmoe", "nf4"), ("olmoe", "fp8_block")],
)
def test_experts_in_groups_choose_the_tokens_of_expanded_ones(family: str, method: str, tmp_path: Path) -> None:
    files = resolve_model(str(make_quantised(family, method, tmp_path, group=32, block=(24, 32))[0]))
    with triton_kernels():
        expanded, _ = load(files)
        assert not any(isinstance(stack, GroupTensor) for stack in stacks_of(expanded))
        want = generate(expanded, 5)
        with groups_kept():
            model, plan = load(files)
        assert all(isinstance(stack, GroupTensor) for stack in stacks_of(model))
        assert any("experts" in name for name in model.group_tensors())
        assert plan.model.weights_bytes == model.weights_bytes() < expanded.weights_bytes()
        found = generate(model, 5)
    torch.testing.assert_close(found[0], want[0], atol=0.05, rtol=0.01)
    assert found[1] == want[1]


def test_experts_that_are_quantised_while_they_load_compute_as_without_the_kernels(tmp_path: Path) -> None:
    files = resolve_model(str(make_tiny("olmoe", tmp_path)))
    with groups_kept():
        want = generate(load(files, "int8")[0], 1)
        with triton_kernels():
            model, plan = load(files, "int8")
            assert all(isinstance(stack, GroupTensor) for stack in stacks_of(model))
            assert plan.model.weights_bytes == model.weights_bytes()
            found = generate(model, 1)
    torch.testing.assert_close(found[0], want[0], atol=0.05, rtol=0.01)
    assert found[1] == want[1]
