"""A block with experts equals transformers' for any spread of rows over experts, and in every form of a checkpoint."""

from pathlib import Path

import pytest
import torch
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.moe import MoE, MoESpec
from octavo_engine.models.registry import build_model
from octavo_engine.ops import triton_devices
from octavo_engine.ops.native_library import native_library
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_testing.paged import PagedDriver
from octavo_testing.tiny_models import make_tiny, tiny_model
from torch import Tensor
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

HIDDEN, EXPERTS = 32, 6


def blocks(top_k: int, router: Tensor, dtype: torch.dtype = torch.float32) -> tuple[MoE, torch.nn.Module]:
    """Return our block and transformers', with equal weights."""
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=top_k,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
    )
    theirs = Qwen2MoeSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        theirs.gate.weight.copy_(router)
    build = BuildContext(dtype=dtype, device=torch.device("cpu"), max_model_len=8)
    spec = MoESpec(num_experts=EXPERTS, top_k=top_k, inner_size=20, normalised=True, shared_size=24)
    ours = MoE("layer", HIDDEN, spec, "silu", build)
    state = {f"layer.mlp.{name}": tensor for name, tensor in theirs.state_dict().items()}
    layers = [module for module in ours.modules() if hasattr(module, "weight_slots")]
    with torch.no_grad():
        for slot in (slot for layer in layers for slot in layer.weight_slots() if slot.name in state):
            slot.load(state[slot.name])
        for layer in layers:
            layer.finish_loading()
    return ours, theirs


def towards(*experts: int) -> Tensor:
    """Return a router that prefers these experts, in this order, for every row of positive numbers."""
    router = torch.zeros(EXPERTS, HIDDEN)
    for rank, expert in enumerate(experts):
        router[expert] = 0.2 - 0.02 * rank
    return router


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize(
    ("top_k", "router", "busy"),
    [
        pytest.param(1, towards(4), {4}, id="all rows on one expert"),
        pytest.param(2, towards(5, 0), {0, 5}, id="all rows on two experts"),
        pytest.param(EXPERTS, towards(*range(EXPERTS)), set(range(EXPERTS)), id="all rows on all experts"),
        pytest.param(2, None, None, id="rows on any experts"),
    ],
)
@pytest.mark.parametrize(
    ("rows", "devices"),
    [(1, set()), (2, set()), (50, set()), (3, {"cpu"}), pytest.param(37, {"cpu"}, marks=pytest.mark.slow)],
)
def test_a_block_equals_that_of_transformers(
    *,
    top_k: int,
    router: Tensor | None,
    busy: set[int] | None,
    rows: int,
    devices: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`devices`: those that run the kernels of GPUs, here in the interpreter."""
    monkeypatch.setattr(triton_devices, "DEVICES", devices)
    ours, theirs = blocks(top_k, torch.randn(EXPERTS, HIDDEN) if router is None else router)
    assert bool(ours.experts.stacks) == bool(devices)
    x = torch.rand(rows, HIDDEN) + 0.1
    with torch.inference_mode():
        if busy is not None:
            assert set(ours.route(x)[1].flatten().tolist()) == busy
        torch.testing.assert_close(ours(x), theirs(x[None])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(native_library() is None, reason="the kernels are not available")
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    ours, _ = blocks(2, torch.randn(EXPERTS, HIDDEN), dtype=torch.bfloat16)
    x = torch.randn(40, HIDDEN, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(torch.cat([ours(row) for row in x.split(1)]), ours(x))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_fused_checkpoints_equal_separate_ones(name: str, tmp_path: Path) -> None:
    """transformers 5 writes the hub's form, one tensor per expert, by default, and on demand its own."""
    separate, fused = make_tiny(name, tmp_path / "separate"), tmp_path / "fused"
    tiny_model(name).save_pretrained(fused, save_original_format=False)
    logits = []
    for folder in (separate, fused):
        files = resolve_model(str(folder))
        model = build_model(load_model_config(files), dtype=torch.float32, device="cpu", max_model_len=72)
        names = [name for name, _ in iter_weights(files)]
        assert any(name.endswith("experts.gate_up_proj") for name in names) == (folder == fused)
        model.load_weights(iter_weights(files))
        model.finish_loading()
        logits.append(PagedDriver(model).feed({0: list(range(3, 43))})[0])
    assert torch.equal(*logits)
