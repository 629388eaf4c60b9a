"""Rows with experts, which the grouped Triton kernels compute on any device, and what torch computes in fp64."""

from dataclasses import dataclass

import torch
from octavo_engine.ops.activation import ACTIVATIONS, act_mul
from octavo_engine.ops.triton.expert_linear import Tile, add_experts, expert_linear, sort_rows
from torch import Tensor

from octavo_testing.kernel_cases import random


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """Rows with their experts, and the weights of these."""

    x: Tensor
    numbers: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    start: Tensor

    @staticmethod
    def make(
        rows: int, top_k: int, size: int = 32, inner: int = 24, experts: int = 8, busy: list[int] | None = None
    ) -> "ExpertCase":
        """Choose `top_k` of the `busy` experts for each row, by default of all."""
        scores = random(rows, experts).softmax(-1)
        if busy is not None:
            scores[:, [i for i in range(experts) if i not in busy]] = 0.0
        weights, numbers = scores.topk(top_k)
        gate_up, down = random(experts, 2 * inner, size, seed=1), random(experts, size, inner, seed=2)
        return ExpertCase(random(rows, size, seed=3), numbers, weights, gate_up, down, random(rows, size, seed=4))

    def to(self, dtype: torch.dtype, device: str) -> "ExpertCase":
        """Return the case with rows and weights of a type. The weights of choices and the start stay in fp32."""
        x, gate_up, down = (part.to(device, dtype) for part in (self.x, self.gate_up, self.down))
        numbers, weights, start = (part.to(device) for part in (self.numbers, self.weights, self.start))
        return ExpertCase(x, numbers, weights, gate_up, down, start)

    def compute(self, tile: Tile, rows: slice = slice(None)) -> Tensor:
        numbers, weights = self.numbers[rows], self.weights[rows]
        ids = torch.arange(len(self.down) + 1, device=self.x.device)
        order = sort_rows(numbers, ids, tile)
        inner = act_mul(expert_linear(self.x[rows], self.gate_up, order, is_sorted=False), ACTIVATIONS["silu"])
        return add_experts(expert_linear(inner, self.down, order, is_sorted=True), numbers, weights, self.start[rows])

    def reference(self) -> Tensor:
        out = self.start.double()
        for row, (numbers, weights) in enumerate(zip(self.numbers.tolist(), self.weights.double(), strict=True)):
            for number, weight in zip(numbers, weights, strict=True):
                gate, up = (self.gate_up[number].double() @ self.x[row].double()).chunk(2)
                out[row] += weight * (self.down[number].double() @ (torch.nn.functional.silu(gate) * up))
        return out

    def error(self, tile: Tile) -> float:
        """Return the largest error, of the largest value."""
        want = self.reference()
        return ((self.compute(tile) - want).abs().max() / want.abs().max()).item()
