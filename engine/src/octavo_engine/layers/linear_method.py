"""Methods of linear layers: one object per layer creates, loads, packs and multiplies its weight.

`DenseMethod` keeps the weight in the model's type and lets `ops.packed_linear` lay it out for the machine. A quantised
format is another subclass of `PackedMethod` with its own weight slots.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.shard import Shard
from octavo_engine.ops.activation import Activation
from octavo_engine.ops.packed_linear import (
    PackedWeight,
    gated_linear,
    num_layouts,
    pack,
    packed_linear,
    plain_weight,
    wide_linear,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A linear layer as the checkpoint stores it. `outs`: the sizes of the output's parts, fused into one weight.

    `names` has one prefix per part, or a single prefix if the checkpoint's tensor is already fused. `transposed`: the
    checkpoint stores [in, out]. `wide`: the layer is multiplied in fp32 only, by `apply_wide`. `gated`: the halves of
    the output are gate and up, for `apply_gated`.
    """

    in_features: int
    outs: tuple[int, ...]
    names: tuple[str, ...]
    bias: bool = False
    transposed: bool = False
    wide: bool = False
    gated: bool = False
    shard: Shard = field(default_factory=Shard)


class LinearMethod(Protocol):
    def weight_slots(self) -> Iterable[WeightSlot]: ...

    def pack(self) -> None: ...

    def apply(self, x: Tensor) -> Tensor: ...

    def apply_wide(self, x: Tensor) -> Tensor:
        """Return fp32 outputs, from sums that are not rounded to 16 bits."""
        ...

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the first half of the outputs, multiplied by the second half."""
        ...

    def weights_bytes(self) -> int: ...

    def bytes_added_by_packing(self) -> int:
        """Return how many bytes packing will add to the weights; call it before `pack`."""
        ...


class PackedMethod:
    """The part of all methods that multiplies, by `ops.packed_linear`. `packed` is None until `pack` sets it."""

    packed: PackedWeight | None = None

    def apply(self, x: Tensor) -> Tensor:
        return packed_linear(x, self._now())

    def apply_wide(self, x: Tensor) -> Tensor:
        return wide_linear(x, self._now())

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        return gated_linear(x, self._now(), activation)

    def _now(self) -> PackedWeight:
        assert self.packed is not None, "not packed yet"
        return self.packed


class DenseMethod(PackedMethod):
    """An unquantised weight, which `pack` lays out by `ops.packed_linear`. A tied weight is packed, never loaded."""

    def __init__(self, spec: LinearSpec, build: BuildContext, tied: Tensor | None = None) -> None:
        shard = spec.shard
        self.spec = spec
        self.tied = tied is not None
        self.outs = [shard.local(out, "out") for out in spec.outs]
        shape = (sum(self.outs), shard.local(spec.in_features, "in"))
        self.weight: Tensor | None = build.empty(*shape) if tied is None else tied
        self._weight_bytes = self.weight.nbytes
        self.bias = build.empty(sum(self.outs)) if spec.bias and self._owns_bias() else None

    def _owns_bias(self) -> bool:
        return self.spec.shard.dim != "in" or self.spec.shard.rank == 0

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self.tied:
            return
        bounds = range(len(self.spec.outs) + 1) if len(self.spec.names) > 1 else (0, len(self.spec.outs))
        for name, (first, last) in zip(self.spec.names, pairwise(bounds), strict=True):
            out = sum(self.spec.outs[first:last])
            shape = (self.spec.in_features, out) if self.spec.transposed else (out, self.spec.in_features)
            yield WeightSlot(f"{name}.weight", shape, partial(self._load_weight, first, last))
            if self.spec.bias:
                yield WeightSlot(f"{name}.bias", (out,), partial(self._load_bias, first, last))

    def _load_weight(self, first: int, last: int, tensor: Tensor) -> None:
        assert self.weight is not None, "packed already"
        tensor = tensor.t() if self.spec.transposed else tensor
        targets = self.weight.split_with_sizes(self.outs)[first:last]
        for target, source in zip(targets, tensor.split_with_sizes(self.spec.outs[first:last]), strict=True):
            target.copy_(self.spec.shard.local_part(source))

    def _load_bias(self, first: int, last: int, tensor: Tensor) -> None:
        if self.bias is None:
            return
        targets = self.bias.split_with_sizes(self.outs)[first:last]
        for target, source in zip(targets, tensor.split_with_sizes(self.spec.outs[first:last]), strict=True):
            target.copy_(self.spec.shard.local_part(source) if self.spec.shard.dim == "out" else source)

    def pack(self) -> None:
        assert self.weight is not None, "packed already"
        self.packed = pack(self.weight, self.bias, wide=self.spec.wide, gated=self.spec.gated)
        self.weight = None

    def _now(self) -> PackedWeight:
        return super()._now() if self.weight is None else plain_weight(self.weight, self.bias)

    def weights_bytes(self) -> int:
        """Return the bytes of weight and bias, without the unknown padding of a packed tensor, which has no storage."""
        is_plain = self.packed is None or self.packed.plain is not None
        num_weights = int(not self.tied) if is_plain else self._now().num_layouts
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return num_weights * self._weight_bytes + bias_bytes

    def bytes_added_by_packing(self) -> int:
        assert self.weight is not None, "packed already"
        layouts, held = num_layouts(self.weight.dtype, wide=self.spec.wide), int(not self.tied)
        return max(0, layouts - held) * self._weight_bytes
