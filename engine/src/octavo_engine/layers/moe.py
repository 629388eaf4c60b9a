"""Mixture of experts: a router selects some experts for each row, and adds their outputs by weight.

Rows are sorted by expert, and each expert that has rows computes them together. The number of rows of an expert depends
on the data: the host waits for it, so a step with experts is neither recorded nor captured. Outputs are added in fp32
and in the order of the experts, so that a row's result does not depend on the rows beside it. Each rank has a part of
every expert; the ranks' sums over experts are added up once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.mlp import GatedMLP, gated_mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """The experts of a layer. `normalised`: the weights of a row's experts are scaled to a sum of 1.

    `shared_size`: inner size of an expert that computes every row, with a gate of its own (Qwen2-MoE). `block` and
    `projections` (gate, up, down): names in a checkpoint with separate tensors for each expert.
    """

    num_experts: int
    top_k: int
    inner_size: int
    normalised: bool
    shared_size: int | None = None
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class MoE(Layer):
    def __init__(self, layer: str, size: int, spec: MoESpec, activation: str, build: BuildContext) -> None:
        """Build the block. `layer`: prefix of the decoder layer's tensors."""
        super().__init__()
        self.spec, self.group = spec, build.group
        prefix = f"{layer}.{spec.block}"
        self.stack_prefix = f"{layer}.mlp"
        self.router = _fp32_linear(f"{prefix}.gate", size, spec.num_experts, build)
        self.experts = [
            gated_mlp(
                f"{prefix}.experts.{idx}", size, spec.inner_size, spec.projections, activation, build, adds_up=False
            )
            for idx in range(spec.num_experts)
        ]
        self.registered_experts = nn.ModuleList(self.experts)
        self.shared: GatedMLP | None = None
        if spec.shared_size is not None:
            names = ("gate_proj", "up_proj", "down_proj")
            shared_prefix = f"{prefix}.shared_expert"
            self.shared = gated_mlp(shared_prefix, size, spec.shared_size, names, activation, build, adds_up=False)
            self.shared_gate = _fp32_linear(f"{prefix}.shared_expert_gate", size, 1, build)

    def __call__(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        weights, experts = self.route(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if self.shared is not None:
            torch.mul(self.shared(x), self.shared_gate.wide(x).sigmoid_(), out=out)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = count_rows(chosen, self.spec.num_experts)
        busy = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in busy]
        rows, weights = order // self.spec.top_k, weights.view(-1, 1).index_select(0, order)
        for expert, part, weight in zip(busy, *(each.split_with_sizes(sizes) for each in (rows, weights)), strict=True):
            out.index_add_(0, part, self.experts[expert](x.index_select(0, part)) * weight)
        return self.group.all_reduce(out.to(x.dtype))

    def route(self, x: Float[Tensor, "tokens hidden"]) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """Return weights, in fp32, and numbers of each row's experts."""
        weights, experts = self.router.wide(x).softmax(-1).topk(self.spec.top_k)
        return weights / weights.sum(-1, keepdim=True) if self.spec.normalised else weights, experts

    def weight_slots(self) -> Iterator[WeightSlot]:
        """List the slots of the form that transformers 5 has in memory, with all experts in one tensor."""
        for slot in self.router.weight_slots():
            if slot.name != f"{self.stack_prefix}.gate.weight":
                yield WeightSlot(f"{self.stack_prefix}.gate.weight", slot.shape, slot.load, instead_of=(slot.name,))
        yield _stack(f"{self.stack_prefix}.experts.gate_up_proj", [expert.gate_up for expert in self.experts])
        yield _stack(f"{self.stack_prefix}.experts.down_proj", [expert.down for expert in self.experts])


def count_rows(chosen: Int[Tensor, " rows"], num_experts: int) -> list[int]:
    """Return the number of rows of each expert: the only place where a step's forward pass waits for the device."""
    counts: list[int] = chosen.bincount(minlength=num_experts).tolist()
    return counts


def _stack(name: str, linears: Sequence[Linear]) -> WeightSlot:
    """Return a slot for one tensor of all experts: [experts, outputs of all parts, inputs]."""
    slots = [list(linear.weight_slots()) for linear in linears]
    rows = [slot.shape[0] for slot in slots[0]]

    def load(stack: Tensor) -> None:
        for parts, weight in zip(slots, stack, strict=True):
            for slot, part in zip(parts, weight.split_with_sizes(rows), strict=True):
                slot.load(part)

    shape = (len(slots), sum(rows), slots[0][0].shape[1])
    return WeightSlot(name, shape, load, instead_of=tuple(slot.name for parts in slots for slot in parts))


def _fp32_linear(name: str, size: int, out: int, build: BuildContext) -> Linear:
    return Linear(LinearSpec(in_features=size, outs=(out,), names=(name,), wide=True), build)
