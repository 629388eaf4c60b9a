"""Methods of linear layers: one object per layer creates, loads, packs and multiplies its weight.

`DenseMethod` keeps the weight in the model's dtype and lets `ops.packed_linear` lay it out for the machine. A quantised
format is another subclass of `PackedMethod` with its own weight slots.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.shard import Shard
from octavo_engine.ops.activation import Activation
from octavo_engine.ops.group_tensor import GroupTensor, WeightFormat
from octavo_engine.ops.native_quantised import QuantisedTensor
from octavo_engine.ops.packed_linear import (
    PackedWeight,
    gated_linear,
    num_layouts,
    pack,
    packed_linear,
    plain_weight,
    wide_linear,
)
from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A linear layer as the checkpoint stores it. `outs`: the sizes of the output's parts, fused into one weight.
    `shard`: the part of it that this rank holds.

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

    @property
    def rank_outs(self) -> list[int]:
        """The sizes of the output's parts on this rank."""
        return [len(self.shard.outputs(part, out)) for part, out in enumerate(self.outs)]

    @property
    def rank_inputs(self) -> int:
        """The number of inputs on this rank."""
        return self.in_features if self.shard.inputs is None else len(self.shard.inputs)

    @property
    def is_whole(self) -> bool:
        """This rank has all of the layer."""
        return self.rank_outs == list(self.outs) and self.rank_inputs == self.in_features


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
    """Base class of all methods: multiplies by `ops.packed_linear`. `packed` is None until `pack` sets it."""

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


class PartsMethod(PackedMethod):
    """Base class of the methods for quantised weights: lists a layer's tensors, and cuts them for this rank.

    `formats`: formats of the tensors that the spec names. A tensor that is not quantised in the checkpoint is quantised
    while it is loaded; only such a tensor may be transposed. The embedding loads a tied weight.
    """

    def __init__(
        self, spec: LinearSpec, build: BuildContext, formats: Sequence[WeightFormat], *, tied: bool = False
    ) -> None:
        self.spec, self.formats, self.tied = spec, formats, tied
        self.quantises = [build.block_format(f"{name}.weight", spec.in_features) is None for name in spec.names]
        self.bias = build.empty(sum(spec.rank_outs)) if spec.bias and spec.shard.owns_bias else None
        self.order: Tensor | None = None  # order of the inputs, equal in all parts
        if formats[0].has_order:
            self.order = build.empty(spec.rank_inputs, dtype=torch.int32)
        self.is_loaded = False
        self._device = build.device

    def weight_slots(self) -> Iterator[WeightSlot]:
        spec, quantises = self.spec, self.quantises
        for i, name in enumerate(spec.names):
            parts = range(i, i + 1) if len(spec.names) > 1 else range(len(spec.outs))
            out = sum(spec.outs[part] for part in parts)
            shape = (spec.in_features, out) if spec.transposed and quantises[i] else (out, spec.in_features)
            stored = None if quantises[i] else self.formats[i]
            load = partial(self._load, f"{name}.weight", parts)
            if not self.tied:
                yield WeightSlot(f"{name}.weight", shape, load, stored, quantises=quantises[i])
            if spec.bias:
                yield WeightSlot(f"{name}.bias", (out,), partial(self._load_bias, parts))

    def _load(self, name: str, parts: range, tensor: Tensor | QuantisedTensor | GroupTensor) -> None:
        self._set_order(name, None if isinstance(tensor, Tensor) else tensor.order)
        for part, rows in self._rank_rows(parts):
            if isinstance(tensor, Tensor):
                values = tensor.t() if self.spec.transposed else tensor
                self._load_values(name, part, self.spec.shard.cut_inputs(values[rows.start : rows.stop]), rows.start)
            else:
                self._load_stored(name, part, tensor, rows)

    def _load_stored(self, name: str, part: int, tensor: Any, rows: range) -> None:
        """Load `rows` of a quantised tensor as outputs of a part; from each row, load only this rank's inputs."""
        raise NotImplementedError

    def _load_values(self, name: str, part: int, values: Tensor, first_row: int) -> None:
        """Quantise rows of a tensor and load them as outputs of a part. `first_row`: their first index, for errors."""
        raise NotImplementedError

    def _rank_rows(self, parts: range) -> Iterator[tuple[int, range]]:
        """Yield each part of a tensor with this rank's rows of it."""
        first = 0
        for part in parts:
            outputs = self.spec.shard.outputs(part, self.spec.outs[part])
            yield part, range(first + outputs.start, first + outputs.stop)
            first += self.spec.outs[part]

    def _load_bias(self, parts: range, tensor: Tensor) -> None:
        if self.bias is not None:
            targets = self.bias.split_with_sizes(self.spec.rank_outs)
            for part, rows in self._rank_rows(parts):
                targets[part].copy_(tensor[rows.start : rows.stop])

    def _set_order(self, name: str, order: Tensor | None) -> None:
        order = None if order is None else order.to(self._device, torch.int32)
        if self.is_loaded and not _are_equal(self.order, order):
            raise StartupError(
                f"tensor '{name}': its inputs have another order than those of the other parts of the layer "
                f"({', '.join(self.spec.names)}): use a checkpoint without act-order, or --dtype float32."
            )
        shard = self.spec.shard
        if order is not None and shard.inputs is not None and shard.group.size > 1:
            raise StartupError(
                f"tensor '{name}': its inputs are in the order of their groups (act-order), which cannot be split over "
                f"--tensor-parallel-size {shard.group.size}: use size 1, --dtype float32, or no act-order checkpoint."
            )
        self.order, self.is_loaded = order, True

    @property
    def order_bytes(self) -> int:
        return 0 if self.order is None else self.order.nbytes

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order)

    def bytes_added_by_packing(self) -> int:
        return 0


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


class DenseMethod(PackedMethod):
    """An unquantised weight; `pack` changes its layout by `ops.packed_linear`. A tied weight is packed, not loaded.

    `place`: the part of a larger tensor to load into.
    """

    def __init__(
        self, spec: LinearSpec, build: BuildContext, tied: Tensor | None = None, *, place: Tensor | None = None
    ) -> None:
        self.spec = spec
        self.tied = tied is not None
        self.outs = spec.rank_outs
        self.weight: Tensor | None = tied if place is None else place
        if self.weight is None:
            self.weight = build.empty(sum(self.outs), spec.rank_inputs)
        self._weight_bytes = self.weight.nbytes
        self.bias = build.empty(sum(self.outs)) if spec.bias and spec.shard.owns_bias else None

    def weight_slots(self) -> Iterator[WeightSlot]:
        bounds = range(len(self.spec.outs) + 1) if len(self.spec.names) > 1 else (0, len(self.spec.outs))
        for name, (first, last) in zip(self.spec.names, pairwise(bounds), strict=True):
            out = sum(self.spec.outs[first:last])
            shape = (self.spec.in_features, out) if self.spec.transposed else (out, self.spec.in_features)
            if not self.tied:
                yield WeightSlot(f"{name}.weight", shape, partial(self._load_weight, first, last))
            if self.spec.bias:
                yield WeightSlot(f"{name}.bias", (out,), partial(self._load_bias, first, last))

    def _load_weight(self, first: int, last: int, tensor: Tensor) -> None:
        assert self.weight is not None, "packed already"
        tensor = tensor.t() if self.spec.transposed else tensor
        self._copy(self.weight, first, last, self.spec.shard.cut_inputs(tensor))

    def _load_bias(self, first: int, last: int, tensor: Tensor) -> None:
        if self.bias is not None:
            self._copy(self.bias, first, last, tensor)

    def _copy(self, to: Tensor, first: int, last: int, tensor: Tensor) -> None:
        """Copy this rank's outputs from a tensor that has the parts [first, last)."""
        targets = to.split_with_sizes(self.outs)[first:last]
        sources = tensor.split_with_sizes(self.spec.outs[first:last])
        for part, target, source in zip(range(first, last), targets, sources, strict=True):
            outputs = self.spec.shard.outputs(part, len(source))
            target.copy_(source[outputs.start : outputs.stop])

    def pack(self) -> None:
        assert self.weight is not None, "packed already"
        self.packed = pack(self.weight, self.bias, wide=self.spec.wide, gated=self.spec.gated)
        self.weight = None

    def _now(self) -> PackedWeight:
        return super()._now() if self.weight is None else plain_weight(self.weight, self.bias)

    def weights_bytes(self) -> int:
        """Return the bytes of weight and bias. A packed tensor has no storage of its own, so padding is not counted."""
        is_plain = self.packed is None or self.packed.plain is not None
        num_weights = int(not self.tied) if is_plain else self._now().num_layouts
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return num_weights * self._weight_bytes + bias_bytes

    def bytes_added_by_packing(self) -> int:
        assert self.weight is not None, "packed already"
        layouts, held = num_layouts(self.weight.dtype, wide=self.spec.wide), int(not self.tied)
        return max(0, layouts - held) * self._weight_bytes
