"""Mixture of experts: a router selects some experts for each row, and adds their outputs by weight.

Rows are sorted by expert. On a GPU, one launch multiplies all of them, and the host waits for nothing. On a CPU, each
expert computes its rows together. The host must then read how many rows each expert has, which depends on the data, so
such a step cannot be recorded. Outputs are added in fp32, in the order of the experts, so that a row's result does not
depend on other rows. Each rank has a part of every expert; an all-reduce sums the results of the ranks once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from octavo_engine.layers.group_method import GroupMethod, empty_groups
from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import DenseMethod, LinearSpec
from octavo_engine.layers.mlp import GatedMLP, activation_named, gated_mlp, gated_specs
from octavo_engine.layers.quantised_method import part_formats
from octavo_engine.ops.activation import act_mul
from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor, WeightFormat
from octavo_engine.ops.native_quantised import QuantisedFormat
from octavo_engine.ops.triton_devices import runs_triton

if TYPE_CHECKING:
    from octavo_engine.ops.triton.expert_linear import Tile


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
        experts = [
            gated_specs(f"{prefix}.experts.{idx}", size, spec.inner_size, spec.projections, build, adds_up=False)
            for idx in range(spec.num_experts)
        ]
        self.experts = Experts(f"{self.stack_prefix}.experts", experts, spec.top_k, activation, build)
        self.shared: GatedMLP | None = None
        if spec.shared_size is not None:
            names = ("gate_proj", "up_proj", "down_proj")
            shared_prefix = f"{prefix}.shared_expert"
            self.shared = gated_mlp(shared_prefix, size, spec.shared_size, names, activation, build, adds_up=False)
            self.shared_gate = _fp32_linear(f"{prefix}.shared_expert_gate", size, 1, build)

    def __call__(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        weights, numbers = self.route(x)
        shared = None if self.shared is None else self.shared(x) * self.shared_gate.wide(x).sigmoid_()
        return self.group.all_reduce(self.experts(x, numbers, weights, shared))

    def route(self, x: Float[Tensor, "tokens hidden"]) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """Return weights, in fp32, and indices of each row's experts."""
        weights, numbers = self.router.wide(x).softmax(-1).topk(self.spec.top_k)
        return weights / weights.sum(-1, keepdim=True) if self.spec.normalised else weights, numbers

    def weight_slots(self) -> Iterator[WeightSlot]:
        """List the router's slot in the form that transformers 5 has in memory."""
        for slot in self.router.weight_slots():
            if slot.name != f"{self.stack_prefix}.gate.weight":
                yield WeightSlot(f"{self.stack_prefix}.gate.weight", slot.shape, slot.load, instead_of=(slot.name,))


class Experts(Layer):
    """Gated feed-forward networks; a router selects some of them for each row. Each rank has a part of every expert.

    On a GPU, the weights of all experts are in one tensor per projection, [experts, out, in], dense or group-quantised;
    the linear layers of each expert load their parts of it, and one launch multiplies all rows. On a CPU, each expert's
    layers are packed, which frees the original weights at once, and applied to the expert's rows.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[tuple[LinearSpec, LinearSpec]],
        top_k: int,
        activation: str,
        build: BuildContext,
    ) -> None:
        """Build the experts. `name`: prefix of tensors that have all experts. `specs`: each expert's layers."""
        super().__init__()
        self.name, self.top_k, self.specs = name, top_k, specs[0]
        self.activation = activation_named(activation)
        kinds = _formats(specs, build)
        if any(isinstance(kind, GroupFormat) for kind in chain(*kinds)) and any(len(kind) > 1 for kind in kinds):
            build = replace(build, block_formats={}, quantise_to=None)  # one launch multiplies weights of one format
            kinds = _formats(specs, build)
        self._kinds = [next(iter(kind)) for kind in kinds]
        has_blocks = any(isinstance(kind, QuantisedFormat) for kind in chain(*kinds))
        is_stacked = runs_triton(build.empty(0)) and not has_blocks
        self.stacks = [*map(partial(_empty_stack, build, len(specs)), self.specs, self._kinds)] if is_stacked else []
        self._dtype = build.dtype
        self._ids = torch.arange(len(specs) + 1, device=build.device)
        self.each = [
            GatedMLP(self._linear(idx, 0, wide, build), self._linear(idx, 1, narrow, build), activation)
            for idx, (wide, narrow) in enumerate(specs)
        ]
        self.packed = nn.ModuleList([] if is_stacked else self.each)

    def __call__(
        self,
        x: Float[Tensor, "tokens hidden"],
        numbers: Int[Tensor, "tokens k"],
        weights: Float[Tensor, "tokens k"],
        start: Float[Tensor, "tokens hidden"] | None = None,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the weighted sum of the outputs of each row's experts. `start`: fp32 rows to which the sum is added,
        perhaps in place."""
        if self.stacks:
            from octavo_engine.ops.triton import expert_linear  # Triton is missing on most machines without a GPU

            outputs = self._outputs(x, numbers, expert_linear.choose_tile(numbers.numel(), len(self.each)))
            return expert_linear.add_experts(outputs, numbers, weights, start)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if start is None else start
        chosen = numbers.flatten()
        order = chosen.argsort(stable=True)
        counts = count_rows(chosen, len(self.each))
        busy = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in busy]
        rows, weights = order // numbers.shape[1], weights.view(-1, 1).index_select(0, order)
        for expert, part, weight in zip(busy, *(each.split_with_sizes(sizes) for each in (rows, weights)), strict=True):
            out.index_add_(0, part, self.each[expert](x.index_select(0, part)) * weight)
        return out.to(x.dtype)

    def _outputs(self, x: Tensor, numbers: Tensor, tile: "Tile") -> Tensor:
        """Return the outputs of each row's k experts, [rows * k, hidden], by grouped products."""
        from octavo_engine.ops.triton.expert_linear import expert_linear, sort_rows

        gate_up, down = self.stacks
        rows = sort_rows(numbers, self._ids, tile)
        inner = act_mul(expert_linear(x, gate_up, rows, is_sorted=False), self.activation)
        return expert_linear(inner, down, rows, is_sorted=True)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """List the slots of the form that transformers 5 has in memory, with all experts in one tensor."""
        if self.stacks:
            for linear in chain.from_iterable((mlp.gate_up, mlp.down) for mlp in self.each):
                yield from linear.weight_slots()
        yield _stack(f"{self.name}.gate_up_proj", [mlp.gate_up for mlp in self.each])
        yield _stack(f"{self.name}.down_proj", [mlp.down for mlp in self.each])

    def finish_loading(self) -> None:
        """Compile the kernels of all tile sizes: a step's number of rows selects one."""
        if self.stacks:
            from octavo_engine.ops.triton.expert_linear import TILES

            for i, linears in enumerate(zip(*((mlp.gate_up, mlp.down) for mlp in self.each), strict=True)):
                self.stacks[i] = _with_orders(self.stacks[i], linears)
            x = torch.zeros(1, self.specs[0].rank_inputs, dtype=self._dtype, device=self._ids.device)
            for tile in TILES:
                self._outputs(x, self._ids[: self.top_k][None], tile)

    def weights_bytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    @property
    def values_per_row(self) -> int:
        """Number of values that the grouped products compute per row: inner values before and after the gate, and
        outputs."""
        wide, narrow = self.specs
        return self.top_k * (sum(wide.rank_outs) + narrow.rank_inputs + sum(narrow.rank_outs))

    def _linear(self, expert: int, projection: int, spec: LinearSpec, build: BuildContext) -> Linear:
        if not self.stacks:
            return Linear(spec, build)
        stack, kind = self.stacks[projection], self._kinds[projection]
        if isinstance(stack, GroupTensor):
            assert isinstance(kind, GroupFormat)
            return Linear(spec, build, method=GroupMethod(spec, build, kind, place=stack.expert(expert)))
        return Linear(spec, build, method=DenseMethod(spec, build, place=stack[expert]))


def _formats(specs: Sequence[tuple[LinearSpec, LinearSpec]], build: BuildContext) -> list[set[WeightFormat | None]]:
    """Return, for each projection, the formats of all experts' parts."""
    return [
        {kind for spec in projection for kind in part_formats(spec, build) or (None,)}
        for projection in zip(*specs, strict=True)
    ]


def _empty_stack(
    build: BuildContext, num_experts: int, spec: LinearSpec, kind: WeightFormat | None
) -> Tensor | GroupTensor:
    if isinstance(kind, GroupFormat):
        return empty_groups(spec, build, kind, num_experts)
    return build.empty(num_experts, sum(spec.rank_outs), spec.rank_inputs)


def _with_orders(stack: Tensor | GroupTensor, linears: Sequence[Linear]) -> Tensor | GroupTensor:
    """Move the experts' input orders (act-order), if there are any, from their layers to a stack; return the stack."""
    methods = [linear.method for linear in linears if isinstance(linear.method, GroupMethod)]
    orders = [method.order for method in methods]
    if not isinstance(stack, GroupTensor) or (stack.order is None and all(order is None for order in orders)):
        return stack
    natural = torch.arange(stack.shape[2], dtype=torch.int32, device=stack.codes.device)
    each = torch.stack([natural if order is None else order for order in orders])
    for method in methods:
        method.order = None
    return replace(stack, order=each if stack.order is None else stack.order.copy_(each))


def count_rows(chosen: Int[Tensor, " rows"], num_experts: int) -> list[int]:
    """Return each expert's number of rows. On a CPU, this waits for no device."""
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
