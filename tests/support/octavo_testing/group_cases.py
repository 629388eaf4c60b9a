"""Random weights in groups, of every kind that a GPU multiplies without expanding it first."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from octavo_engine.ops.group_tensor import Codes, GroupFormat, GroupTensor, Offsets, expand_groups, pack_nibbles
from octavo_engine.ops.triton.expert_linear import Tile
from octavo_engine.ops.triton.group_linear import choose_tile, multiply
from torch import Tensor

from octavo_testing.kernel_cases import random

#: Codes and offsets.
KINDS: dict[str, tuple[Codes, Offsets]] = {
    "int4": ("int4", "none"),
    "int4 with zeros": ("int4", "zeros"),
    "int4 with minimums": ("int4", "minimums"),
    "int8": ("int8", "none"),
    "e4m3": ("e4m3", "none"),
    "table4": ("table4", "none"),
}


def random_group_tensor(
    kind: str,
    out: int,
    size: int,
    group: int,
    *,
    scale_dtype: torch.dtype = torch.float16,
    order: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> GroupTensor:
    """Return random codes, all of them that are numbers, and scales of 0.001 to 0.011."""
    place = "cpu" if device == "meta" else device
    draw = torch.Generator(place).manual_seed(seed)
    codes, offsets = KINDS[kind]
    numbers = torch.randint(0, 256, (out, size), dtype=torch.uint8, generator=draw, device=place)
    if codes == "e4m3":
        numbers[numbers & 127 == 127] = 126  # NaN
    scales = (torch.rand(size // group, out, generator=draw, device=place) * 0.01 + 0.001).to(scale_dtype)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=draw, device=place)
    by_offsets = {"none": None, "zeros": zeros, "minimums": -(scales * zeros).to(scale_dtype)}
    table = torch.randn(16, generator=draw, device=place).sort().values if codes == "table4" else None
    parts = (scales, by_offsets[offsets], table, torch.randperm(size, generator=draw, device=place) if order else None)
    scales, found, table, inputs = (None if part is None else part.to(device) for part in parts)
    assert scales is not None
    return GroupTensor(
        format=GroupFormat(name=kind, codes=codes, group_size=group, scale_dtype=scale_dtype, offsets=offsets),
        codes=(pack_nibbles(numbers & 15) if codes in ("int4", "table4") else numbers).to(device),
        scales=scales,
        offsets=found,
        table=table,
        order=inputs,
    )


def rounded_by_torch(x: Tensor, num_groups: int, given: float | None = None) -> Tensor:
    """Return the values of rows that are rounded to e4m3, in fp64."""
    groups = x.double().view(len(x), num_groups, -1).float()
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scales = largest / 448 if given is None else torch.full_like(largest, given)
    return ((groups * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scales.double()).view(x.shape)


def stack_experts(weights: Iterable[GroupTensor]) -> GroupTensor:
    """Return the weights of several experts as one."""
    parts = [*weights]

    def stack(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.stack(found)

    names = ("codes", "scales", "offsets", "table", "order")
    return GroupTensor(format=parts[0].format, **{name: stack(name) for name in names})


@dataclass(frozen=True, slots=True)
class GroupCase:
    """Rows, a weight and a bias."""

    x: Tensor
    weight: GroupTensor
    bias: Tensor | None

    @staticmethod
    def make(kind: str, rows: int, group: int, *, out: int = 67, size: int = 512, bias: bool = False) -> "GroupCase":
        """Return a case in fp16."""
        half, weight = torch.float16, random_group_tensor(kind, out, size, group)
        return GroupCase(random(rows, size, dtype=half, seed=1), weight, random(out, dtype=half) if bias else None)

    def compute(self, x: Tensor, tile: Tile, parts: int = 2) -> Tensor:
        return multiply(x, self.weight, self.bias, torch.float32, tile, parts)

    def error_of_parts(self, parts: int) -> float:
        """Return the error of a product whose inputs are in so many parts."""
        return self.error(self.compute(self.x, choose_tile(len(self.x)), parts))

    def reference(self) -> Tensor:
        """Return the product with the expanded weight, in fp64."""
        out = self.x.double() @ expand_groups(self.weight, self.x.dtype).double().t()
        return out if self.bias is None else out + self.bias.double()

    def error(self, got: Tensor) -> float:
        """Return the largest error, of the largest value."""
        want = self.reference()
        return ((got - want).abs().max() / want.abs().max()).item()
