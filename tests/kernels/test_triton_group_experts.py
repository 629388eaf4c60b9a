"""Experts whose weights are in groups, by Triton's kernels in the interpreter, against those of expanded weights."""

from dataclasses import replace

import pytest
import torch
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.mlp import gated_specs
from octavo_engine.layers.moe import Experts
from octavo_engine.ops import triton_devices
from octavo_engine.ops.group_tensor import GroupTensor, expand_groups
from octavo_engine.ops.triton.expert_linear import TILES, Tile, expert_linear, sort_rows
from octavo_testing.group_cases import KINDS, random_group_tensor, stack_experts
from octavo_testing.kernel_cases import random

pytestmark = pytest.mark.slow

EXPERTS, OUT, SIZE = 4, 70, 64


def make_stack(kind: str, group: int, *, order: bool = False) -> GroupTensor:
    return stack_experts(random_group_tensor(kind, OUT, SIZE, group, order=order, seed=i) for i in range(EXPERTS))


def multiply(x: torch.Tensor, weight: GroupTensor, numbers: torch.Tensor, tile: Tile) -> torch.Tensor:
    rows = sort_rows(numbers, torch.arange(EXPERTS + 1), tile)
    out = torch.empty(numbers.numel(), OUT, dtype=x.dtype)
    out[rows.slots] = expert_linear(x, weight, rows, is_sorted=False)
    sorted_x = x.repeat_interleave(numbers.shape[1], 0)[rows.slots]
    again = expert_linear(sorted_x, weight, rows, is_sorted=True)
    assert torch.equal(again.nan_to_num(9), out.nan_to_num(9))
    return out


def expected(x: torch.Tensor, weight: GroupTensor, numbers: torch.Tensor) -> torch.Tensor:
    found = []
    for row, chosen in zip(x.double(), numbers.tolist(), strict=True):
        for part in map(weight.expert, chosen):
            inputs = row if part.order is None else row[part.order]
            found.append(expand_groups(part, x.dtype).double() @ inputs)
    return torch.stack(found)


@pytest.mark.parametrize("order", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize(("kind", "group"), [(kind, 32) for kind in KINDS] + [("int4 with zeros", SIZE)])
def test_experts_equal_those_of_expanded_weights(kind: str, group: int, order: bool) -> None:
    x, numbers = random(5, SIZE, dtype=torch.float16), random(5, EXPERTS, seed=1).topk(2).indices
    weight = make_stack(kind, group, order=order)
    want = expected(x, weight, numbers)
    assert (multiply(x, weight, numbers, TILES[0]) - want).abs().max() <= 6e-4 * want.abs().max()


@pytest.mark.parametrize("tile", TILES[:2], ids=["16 rows", "64 rows"])
def test_the_bits_of_a_row_depend_on_no_other(tile: Tile) -> None:
    x, numbers = random(20, SIZE, dtype=torch.float16), random(20, EXPERTS, seed=1).topk(2).indices
    weight = make_stack("int4", 32)
    crowded = multiply(x, weight, numbers, tile)
    assert torch.equal(multiply(x[7:8], weight, numbers[7:8], tile), crowded[14:16])
    x[:7].fill_(float("nan"))
    assert torch.equal(multiply(x, weight, numbers, tile)[14:], crowded[14:])


def test_an_expert_is_a_view_of_the_stack() -> None:
    stack = make_stack("int4 with zeros", 32)
    stack.expert(2).codes.zero_()
    assert not stack.codes[2].any()
    assert stack.shape == (EXPERTS, OUT, SIZE)
    assert stack.nbytes == sum(stack.expert(i).nbytes for i in range(EXPERTS))
    assert replace(stack, order=None).expert(1).order is None


@pytest.mark.parametrize("ordered", ["gate_up", "down"])
def test_each_expert_may_have_an_order_of_its_inputs(ordered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_devices, "DEVICES", {"cpu"})
    build = BuildContext(dtype=torch.float16, device=torch.device("cpu"), max_model_len=16)
    names = [[f"{i}.{part}" for part in ("gate", "up", "down")] for i in range(EXPERTS)]
    specs = [gated_specs(f"{i}", SIZE, 96, ("gate", "up", "down"), build, adds_up=False) for i in range(EXPERTS)]
    kind = random_group_tensor("int4", 1, SIZE, 32).format
    kinds = [replace(kind, has_order=(part == "down") == (ordered == "down")) for part in ("gate", "up", "down")]
    formats = {f"{name}.weight": own for each in names for name, own in zip(each, kinds, strict=True)}
    kept = replace(build, block_formats=formats)
    groups, plain = Experts("experts", specs, 2, "silu", kept), Experts("experts", specs, 2, "silu", build)
    weights: dict[str, GroupTensor] = {}
    for i, (gate, up, down) in enumerate(names):
        for name, out, size in ((gate, 96, SIZE), (up, 96, SIZE), (down, SIZE, 96)):
            has_order, draw = (name == down) == (ordered == "down") and i != 1, torch.Generator().manual_seed(i)
            order = torch.randperm(size, generator=draw) if has_order else None
            weights[f"{name}.weight"] = replace(random_group_tensor("int4", out, size, 32, seed=i), order=order)
    planned = groups.weights_bytes()
    for slot in groups.weight_slots():
        if slot.name in weights:
            slot.load(weights[slot.name])
    for slot in plain.weight_slots():
        if slot.name in weights:
            values = expand_groups(weights[slot.name], torch.float16)
            order = weights[slot.name].order
            slot.load(values if order is None else values[:, order.argsort()])
    groups.finish_loading()
    assert groups.weights_bytes() == planned
    assert not [each for each in groups.each if each.gate_up.method.order_bytes or each.down.method.order_bytes]
    x, numbers = random(5, SIZE, dtype=torch.float16), random(5, EXPERTS, seed=1).topk(2).indices
    shares = torch.full((5, 2), 0.5)
    assert all(isinstance(stack, GroupTensor) for stack in groups.stacks)
    torch.testing.assert_close(groups(x, numbers, shares), plain(x, numbers, shares), atol=2e-3, rtol=2e-3)
