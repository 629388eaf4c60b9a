"""The method of a linear layer whose weight stays in a checkpoint's blocks, and the choice of a layer's method."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from torch import Tensor

from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.linear_method import DenseMethod, LinearMethod, LinearSpec, PackedMethod
from octavo_engine.ops.native_blocks import BlockFormat, BlockTensor, BlockWeight
from octavo_engine.ops.packed_linear import PackedWeight
from octavo_engine.wire.errors import StartupError


def linear_method(spec: LinearSpec, build: BuildContext, tied: Tensor | BlockWeight | None) -> LinearMethod:
    """Choose the method: blocks, if all parts of the weight have one format that the kernels expand."""
    if isinstance(tied, BlockWeight):
        return BlockMethod(spec, build, tied, tied=True)
    block_format = common_format(spec, build)
    if tied is not None or block_format is None:
        return DenseMethod(spec, build, tied)
    weight = BlockWeight(block_format, sum(spec.outs), spec.in_features, build.device, gated=spec.gated)
    return BlockMethod(spec, build, weight)


def common_format(spec: LinearSpec, build: BuildContext) -> BlockFormat | None:
    """Return the format of all parts; None if they differ, or if each rank holds a part, which is not supported yet."""
    formats = {build.block_format(f"{name}.weight", spec.in_features) for name in spec.names}
    return formats.pop() if len(formats) == 1 and spec.shard.dim is None else None


class BlockMethod(PackedMethod):
    """A weight in blocks. A tied weight is loaded by the embedding. Checkpoints store blocks as [out, in] only."""

    def __init__(self, spec: LinearSpec, build: BuildContext, weight: BlockWeight, *, tied: bool = False) -> None:
        self.spec, self.weight, self.tied = spec, weight, tied
        self.bias = build.empty(sum(spec.outs)) if spec.bias else None

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self.tied:
            return
        outs = self.spec.outs if len(self.spec.names) > 1 else (sum(self.spec.outs),)
        bounds = pairwise([sum(outs[:i]) for i in range(len(outs) + 1)])
        for name, (first, last) in zip(self.spec.names, bounds, strict=True):
            yield block_slot(f"{name}.weight", self.weight, first, last)
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (last - first,), self.bias[first:last].copy_)

    def pack(self) -> None:
        out_features, in_features = self.weight.shape
        self.packed = PackedWeight(out_features, in_features, bias=self.bias, native=self.weight.native(self.bias))

    def weights_bytes(self) -> int:
        return (0 if self.tied else self.weight.nbytes) + (0 if self.bias is None else self.bias.nbytes)

    def bytes_added_by_packing(self) -> int:
        return 0


def block_slot(name: str, weight: BlockWeight, first: int, last: int) -> WeightSlot:
    """Return the slot of outputs [first, last) of a weight."""
    return WeightSlot(name, (last - first, weight.shape[1]), partial(_load, name, weight, first), weight.format)


def _load(name: str, weight: BlockWeight, first: int, tensor: BlockTensor) -> None:
    bad_row = weight.load(first, tensor)
    if bad_row is not None:
        raise StartupError(
            f"tensor '{name}': row {bad_row} has an infinite or NaN scale or minimum in a "
            f"{tensor.format.name} block: the file is corrupt; download or convert it again."
        )
