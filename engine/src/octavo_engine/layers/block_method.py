"""The method of a linear layer whose weight stays in a checkpoint's blocks, and the choice of a layer's method."""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.linear_method import DenseMethod, LinearMethod, LinearSpec, PackedMethod
from octavo_engine.ops.native_blocks import BlockFormat, BlockTensor, BlockWeight, native_blocks
from octavo_engine.ops.packed_linear import PackedWeight
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
    """Return the formats of the parts; None if one has none, or if each rank holds a part, which is not supported."""
    formats = [build.block_format(f"{name}.weight", spec.in_features) for name in spec.names]
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

    Checkpoints store blocks as [out, in] only.
    """

    def __init__(
        self, spec: LinearSpec, build: BuildContext, weights: Sequence[BlockWeight], *, tied: bool = False
    ) -> None:
        self.spec, self.weights, self.tied = spec, weights, tied
        self.bias = build.empty(sum(spec.outs)) if spec.bias else None

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self.tied:
            return
        outs = self.spec.outs if len(self.spec.names) > 1 else (sum(self.spec.outs),)
        for i, (name, out) in enumerate(zip(self.spec.names, outs, strict=True)):
            first = sum(outs[:i])
            one = len(self.weights) == 1
            yield block_slot(f"{name}.weight", self.weights[0 if one else i], first if one else 0, out)
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (out,), self.bias[first : first + out].copy_)

    def pack(self) -> None:
        native = native_blocks(self.weights, self.bias)
        self.packed = PackedWeight(native.out_features, native.in_features, bias=self.bias, native=native)

    def weights_bytes(self) -> int:
        weights = 0 if self.tied else sum(weight.nbytes for weight in self.weights)
        return weights + (0 if self.bias is None else self.bias.nbytes)

    def bytes_added_by_packing(self) -> int:
        return 0


def block_slot(name: str, weight: BlockWeight, first: int, out: int) -> WeightSlot:
    """Return the slot of the `out` outputs of a weight from `first`."""
    return WeightSlot(name, (out, weight.shape[1]), partial(_load, name, weight, first), weight.format)


def _load(name: str, weight: BlockWeight, first: int, tensor: BlockTensor) -> None:
    bad_row = weight.load(first, tensor)
    if bad_row is not None:
        raise StartupError(
            f"tensor '{name}': row {bad_row} has an infinite or NaN scale or minimum in a "
            f"{tensor.format.name} block: the file is corrupt; download or convert it again."
        )
