"""Experts: a CPU computes the bits of a plain loop, and every device has their weights in memory once."""

import gc
from typing import Any

import pytest
import torch
from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.layers.moe import Experts, MoE, MoESpec
from octavo_engine.ops import triton_devices
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.rank_group import Group
from octavo_engine.weights.dummy import dummy_weights
from octavo_testing.gpu_compiler import FirstOfMany
from torch import Tensor

HIDDEN, INNER, EXPERTS = 64, 96, 5
PARTS = ("gate", "up", "down")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def build_block(dtype: torch.dtype = torch.float32, *, group: Group | None = None, **fields: Any) -> MoE:
    spec = MoESpec(**{"num_experts": EXPERTS, "top_k": 2, "inner_size": INNER, "normalised": True, **fields})
    build = BuildContext(dtype=dtype, device=torch.device("cpu"), max_model_len=8, group=group or Group())
    return MoE("layer", HIDDEN, spec, "silu", build)


def layers_of(moe: MoE) -> list[Layer]:
    return [module for module in moe.modules() if isinstance(module, Layer)]


def load(moe: MoE, *, fused: bool = False) -> MoE:
    """Load random weights, of all experts as one tensor for each projection if `fused`."""
    slots = {slot.name: slot for layer in layers_of(moe) for slot in layer.weight_slots()}
    weights = dict(dummy_weights((name, slot.shape) for name, slot in slots.items() if not slot.instead_of))
    if fused:
        parts = {
            part: [weights.pop(f"layer.mlp.experts.{i}.{part}_proj.weight") for i in range(EXPERTS)] for part in PARTS
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        weights["layer.mlp.experts.gate_up_proj"] = torch.stack(both)
        weights["layer.mlp.experts.down_proj"] = torch.stack(parts["down"])
    with torch.no_grad():
        for name, tensor in weights.items():
            slots[name].load(tensor)
        for layer in layers_of(moe):
            layer.finish_loading()
    return moe


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand for a GPU."""
    monkeypatch.setattr(triton_devices, "DEVICES", {"cpu"})


def plain_loop(moe: MoE, x: Tensor) -> Tensor:
    """Compute a block as it was computed before experts had a class of their own."""
    weights, experts = moe.router.wide(x).softmax(-1).topk(moe.spec.top_k)
    weights = weights / weights.sum(-1, keepdim=True) if moe.spec.normalised else weights
    out = torch.zeros(x.shape, dtype=torch.float32)
    if moe.shared is not None:
        torch.mul(moe.shared(x), moe.shared_gate.wide(x).sigmoid_(), out=out)
    order = experts.flatten().argsort(stable=True)
    counts: list[int] = experts.flatten().bincount(minlength=EXPERTS).tolist()
    parts = (order // moe.spec.top_k).split_with_sizes(counts)
    scales = weights.view(-1, 1).index_select(0, order).split_with_sizes(counts)
    for expert, part, scale in zip(moe.experts.each, parts, scales, strict=True):
        if len(part):
            out.index_add_(0, part, expert(x.index_select(0, part)) * scale)
    return out.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fields",
    [{"top_k": 1, "normalised": False}, {"top_k": 2}, {"top_k": 4, "shared_size": 32}, {"top_k": EXPERTS}],
    ids=str,
)
def test_a_cpu_computes_the_bits_of_a_plain_loop(fields: dict[str, Any], dtype: torch.dtype) -> None:
    moe = load(build_block(dtype, **fields))
    with torch.inference_mode():
        for rows in (1, 7, 40):
            x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert torch.equal(moe(x), plain_loop(moe, x)), rows


def bytes_in_memory() -> int:
    """Return the bytes of all tensors; those in oneDNN's layout have no storage."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.skipif(native_library() is None, reason="the kernels are not available")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_weights_are_in_memory_once(device: str, request: pytest.FixtureRequest) -> None:
    """A CPU's bf16 kernels read panels, of the size of the weight where it is whole panels."""
    if device == "gpu":
        request.getfixturevalue("_gpu")
    before = bytes_in_memory()
    moe = load(build_block(torch.bfloat16))
    needed = sum(layer.weights_bytes() for layer in layers_of(moe))
    assert needed >= 3 * EXPERTS * HIDDEN * INNER * torch.bfloat16.itemsize
    assert needed <= bytes_in_memory() - before <= 1.1 * needed


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("fused", [False, True], ids=["tensors of each expert", "tensors of all experts"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_has_one_tensor_for_each_projection(ranks: int, fused: bool) -> None:
    moe = load(build_block(group=FirstOfMany(0, ranks)), fused=fused)
    weights = dict(dummy_weights((n, s) for n, s in shapes().items()))
    inner = moe.experts.each[0].down.spec.rank_inputs
    assert (inner < INNER) == (ranks > 1)
    for expert in range(EXPERTS):
        gate, up, down = (weights[f"layer.mlp.experts.{expert}.{part}_proj.weight"] for part in PARTS)
        gate_up, stacked_down = (stack[expert] for stack in moe.experts.stacks)
        assert torch.equal(gate_up, torch.cat([gate[:inner], up[:inner]]))
        assert torch.equal(stacked_down, down[:, :inner])


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the experts' tensors in a checkpoint that has one for each expert."""
    names = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {f"layer.mlp.experts.{i}.{part}_proj.weight": shape for i in range(EXPERTS) for part, shape in names.items()}


def test_a_cpu_has_layers_of_each_expert() -> None:
    """A packed copy of a part of one tensor would keep all of it in memory until the last expert is packed."""
    experts = load(build_block()).experts
    assert isinstance(experts, Experts)
    assert not experts.stacks
    assert len(experts.packed) == EXPERTS
