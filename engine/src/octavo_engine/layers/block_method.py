"""The method of a linear layer whose weight is kept in blocks, and the choice of a layer's method."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.linear_method import DenseMethod, LinearMethod, LinearSpec, PackedMethod
from octavo_engine.ops.activation import Activation
from octavo_engine.ops.native_blocks import BlockFormat, BlockTensor, BlockWeight, native_blocks
from octavo_engine.ops.packed_linear import PackedWeight
from octavo_engine.ops.quantise import quantised_slices
from octavo_engine.wire.errors import StartupError


def linear_method(spec: LinearSpec, build: BuildContext, tied: Tensor | BlockWeight | None) -> LinearMethod:
    """Choose the method: blocks, if the kernels expand the format of each part of the weight."""
    if isinstance(tied, BlockWeight):
        return BlockMethod(spec, build, [tied], tied=True)
    formats = part_formats(spec, build)
    if tied is not None or formats is None:
        return DenseMethod(spec, build, tied)
    return BlockMethod(spec, build, empty_weights(spec, build, formats))


def part_formats(spec: LinearSpec, build: BuildContext) -> list[BlockFormat] | None:
    """Return the formats of the parts; None if one has none, or if each rank holds a part, which is not supported.

    A wide layer, which is a logits head or a router of experts, is not quantised.
    """
    other = None if spec.wide else build.quantised_format(spec.in_features)
    formats = [build.block_format(f"{name}.weight", spec.in_features) or other for name in spec.names]
    known = [block_format for block_format in formats if block_format is not None]
    return known if len(known) == len(formats) and spec.shard.dim is None else None


def empty_weights(spec: LinearSpec, build: BuildContext, formats: Sequence[BlockFormat]) -> list[BlockWeight]:
    """Return one weight for parts of one format, else one for each part, which are then not gated."""
    if len(set(formats)) == 1:
        return [BlockWeight(formats[0], sum(spec.outs), spec.in_features, build.device, gated=spec.gated)]
    parts = zip(formats, spec.outs, strict=True)
    return [BlockWeight(block_format, out, spec.in_features, build.device) for block_format, out in parts]


class BlockMethod(PackedMethod):
    """Weights in blocks, one or one for each part. A tied weight is loaded by the embedding.

    A part that is not in blocks in the checkpoint is quantised as it arrives. Checkpoints store blocks as [out, in]
    only.
    """

    def __init__(
        self, spec: LinearSpec, build: BuildContext, weights: Sequence[BlockWeight], *, tied: bool = False
    ) -> None:
        self.spec, self.weights, self.tied = spec, weights, tied
        self.quantises = [build.block_format(f"{name}.weight", spec.in_features) is None for name in spec.names]
        self.bias = build.empty(sum(spec.outs)) if spec.bias else None
        self.order: Tensor | None = None  # of the inputs, equal in all parts
        self.is_loaded = False

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self.tied:
            return
        outs = self.spec.outs if len(self.spec.names) > 1 else (sum(self.spec.outs),)
        for i, (name, out) in enumerate(zip(self.spec.names, outs, strict=True)):
            first = sum(outs[:i])
            one = len(self.weights) == 1
            weight, place = self.weights[0 if one else i], first if one else 0
            if self.quantises[i]:
                slot = _quantising_slot(f"{name}.weight", weight, place, out, transposed=self.spec.transposed)
            else:
                slot = block_slot(f"{name}.weight", weight, place, out)
            yield replace(slot, load=partial(self._load, slot))
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (out,), self.bias[first : first + out].copy_)

    def _load(self, slot: WeightSlot, tensor: Tensor | BlockTensor) -> None:
        order = tensor.order if isinstance(tensor, BlockTensor) else None
        if self.is_loaded and not _are_equal(self.order, order):
            raise StartupError(
                f"tensor '{slot.name}': its inputs have another order than those of the other parts of the layer "
                f"({', '.join(self.spec.names)}): use a checkpoint without act-order, or --dtype float32."
            )
        self.order, self.is_loaded = order, True
        slot.load(tensor)

    def apply(self, x: Tensor) -> Tensor:
        return super().apply(self._ordered(x))

    def apply_wide(self, x: Tensor) -> Tensor:
        return super().apply_wide(self._ordered(x))

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        return super().apply_gated(self._ordered(x), activation)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order)

    def pack(self) -> None:
        native = native_blocks(self.weights, self.bias)
        self.packed = PackedWeight(native.out_features, native.in_features, bias=self.bias, native=native)

    def weights_bytes(self) -> int:
        weights = 0 if self.tied else sum(weight.nbytes for weight in self.weights)
        return weights + (0 if self.bias is None else self.bias.nbytes)

    def bytes_added_by_packing(self) -> int:
        return 0


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def block_slot(name: str, weight: BlockWeight, first: int, out: int) -> WeightSlot:
    """Return the slot of the `out` outputs of a weight from `first`."""
    return WeightSlot(name, (out, weight.shape[1]), partial(_load_blocks, name, weight, first), weight.format)


def _load_blocks(name: str, weight: BlockWeight, first: int, tensor: BlockTensor) -> None:
    bad_row = weight.load(first, tensor)
    if bad_row is not None:
        raise StartupError(
            f"tensor '{name}': row {bad_row} has an infinite or NaN scale or minimum in a "
            f"{tensor.format.name} block: the file is corrupt; download or convert it again."
        )


def _quantising_slot(name: str, weight: BlockWeight, first: int, out: int, *, transposed: bool) -> WeightSlot:
    shape = (weight.shape[1], out) if transposed else (out, weight.shape[1])
    return WeightSlot(name, shape, partial(_load_quantised, name, weight, first, transposed), quantises=True)


def _load_quantised(name: str, weight: BlockWeight, first: int, transposed: bool, tensor: Tensor) -> None:
    for start, rows in quantised_slices(tensor.t() if transposed else tensor, weight.format):
        bad_row = weight.load(first + start, rows)
        if bad_row is not None:
            raise StartupError(
                f"tensor '{name}': output {start + bad_row} has a weight that is infinite, not a number or too large "
                f"for {weight.format.name} blocks: download the checkpoint again, or omit --quantization."
            )
