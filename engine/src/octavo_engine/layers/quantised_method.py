"""The method of a linear layer whose weight is kept in blocks, and the choice of a layer's method."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.linear_method import DenseMethod, LinearMethod, LinearSpec, PackedMethod
from octavo_engine.ops.activation import Activation
from octavo_engine.ops.native_quantised import QuantisedFormat, QuantisedTensor, QuantisedWeight, native_quantised
from octavo_engine.ops.packed_linear import PackedWeight
from octavo_engine.ops.quantise import quantised_slices
from octavo_engine.wire.errors import StartupError


def linear_method(spec: LinearSpec, build: BuildContext, tied: Tensor | QuantisedWeight | None) -> LinearMethod:
    """Choose the method: blocks, if the kernels expand the format of each part of the weight."""
    if isinstance(tied, QuantisedWeight):
        return QuantisedMethod(spec, build, [tied], tied=True)
    formats = part_formats(spec, build)
    if tied is not None or formats is None:
        return DenseMethod(spec, build, tied)
    return QuantisedMethod(spec, build, empty_weights(spec, build, formats))


def part_formats(spec: LinearSpec, build: BuildContext) -> list[QuantisedFormat] | None:
    """Return the formats of the parts; None if one has none.

    A wide layer, which is a logits head or a router of experts, is not quantised.
    """
    other = None if spec.wide else build.quantised_format(spec.in_features)
    formats = [build.block_format(f"{name}.weight", spec.in_features) or other for name in spec.names]
    known = [block_format for block_format in formats if block_format is not None]
    return known if len(known) == len(formats) else None


def empty_weights(spec: LinearSpec, build: BuildContext, formats: Sequence[QuantisedFormat]) -> list[QuantisedWeight]:
    """Return one weight for parts of one format, else one for each part, which are then not gated."""
    if len(set(formats)) == 1:
        return [QuantisedWeight(formats[0], sum(spec.rank_outs), spec.rank_inputs, build.device, gated=spec.gated)]
    parts = zip(formats, spec.rank_outs, strict=True)
    return [QuantisedWeight(block_format, out, spec.rank_inputs, build.device) for block_format, out in parts]


class QuantisedMethod(PackedMethod):
    """Weights in blocks, one or one for each part. A tied weight is loaded by the embedding.

    A part that is not in blocks in the checkpoint is quantised as it arrives. Checkpoints store blocks as [out, in]
    only.
    """

    def __init__(
        self, spec: LinearSpec, build: BuildContext, weights: Sequence[QuantisedWeight], *, tied: bool = False
    ) -> None:
        self.spec, self.weights, self.tied = spec, weights, tied
        self.quantises = [build.block_format(f"{name}.weight", spec.in_features) is None for name in spec.names]
        self.bias = build.empty(sum(spec.rank_outs)) if spec.bias and spec.shard.owns_bias else None
        self.order: Tensor | None = None  # of the inputs, equal in all parts
        self.is_loaded = False

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self.tied:
            return
        spec, quantises = self.spec, self.quantises
        for i, name in enumerate(spec.names):
            parts = range(i, i + 1) if len(spec.names) > 1 else range(len(spec.outs))
            out = sum(spec.outs[part] for part in parts)
            shape = (spec.in_features, out) if spec.transposed and quantises[i] else (out, spec.in_features)
            block_format = None if quantises[i] else self._place(i)[0].format
            load = partial(self._load, f"{name}.weight", parts, quantises[i])
            yield WeightSlot(f"{name}.weight", shape, load, block_format, quantises=quantises[i])
            if spec.bias:
                yield WeightSlot(f"{name}.bias", (out,), partial(self._load_bias, parts))

    def _place(self, part: int) -> tuple[QuantisedWeight, int]:
        """Return the weight of a part, and the part's first output in it."""
        if len(self.weights) > 1:
            return self.weights[part], 0
        return self.weights[0], sum(self.spec.rank_outs[:part])

    def _rank_rows(self, parts: range) -> Iterator[tuple[int, range]]:
        """Yield each part with the rows that this rank holds of the tensor that has these parts."""
        first = 0
        for part in parts:
            outputs = self.spec.shard.outputs(part, self.spec.outs[part])
            yield part, range(first + outputs.start, first + outputs.stop)
            first += self.spec.outs[part]

    def _load(self, name: str, parts: range, quantises: bool, tensor: Tensor | QuantisedTensor) -> None:
        self._set_order(name, tensor.order if isinstance(tensor, QuantisedTensor) else None)
        if isinstance(tensor, Tensor):
            tensor = tensor.t() if self.spec.transposed else tensor
        for part, rows in self._rank_rows(parts):
            weight, output = self._place(part)
            if isinstance(tensor, QuantisedTensor):
                blocks = self.spec.shard.cut_inputs(
                    tensor.rows[rows.start : rows.stop], tensor.format.num_values, tensor.format.num_bytes
                )
                load_blocks(name, weight, QuantisedTensor(tensor.format, blocks.contiguous()), output, rows.start)
            else:
                values = self.spec.shard.cut_inputs(tensor[rows.start : rows.stop])
                _load_quantised(name, weight, values, output, rows.start)

    def _load_bias(self, parts: range, tensor: Tensor) -> None:
        if self.bias is not None:
            targets = self.bias.split_with_sizes(self.spec.rank_outs)
            for part, rows in self._rank_rows(parts):
                targets[part].copy_(tensor[rows.start : rows.stop])

    def _set_order(self, name: str, order: Tensor | None) -> None:
        if self.is_loaded and not _are_equal(self.order, order):
            raise StartupError(
                f"tensor '{name}': its inputs have another order than those of the other parts of the layer "
                f"({', '.join(self.spec.names)}): use a checkpoint without act-order, or --dtype float32."
            )
        shard = self.spec.shard
        if order is not None and shard.inputs is not None and shard.group.size > 1:
            raise StartupError(
                f"tensor '{name}': its inputs are in the order of their groups (act-order), which cannot be split over "
                f"--tensor-parallel-size {shard.group.size}: use a checkpoint without act-order, --dtype float32, or 1."
            )
        self.order, self.is_loaded = order, True

    def apply(self, x: Tensor) -> Tensor:
        return super().apply(self._ordered(x))

    def apply_wide(self, x: Tensor) -> Tensor:
        return super().apply_wide(self._ordered(x))

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        return super().apply_gated(self._ordered(x), activation)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order)

    def pack(self) -> None:
        native = native_quantised(self.weights, self.bias)
        self.packed = PackedWeight(native.out_features, native.in_features, bias=self.bias, native=native)

    def weights_bytes(self) -> int:
        weights = 0 if self.tied else sum(weight.nbytes for weight in self.weights)
        return weights + (0 if self.bias is None else self.bias.nbytes)

    def bytes_added_by_packing(self) -> int:
        return 0


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def load_blocks(
    name: str, weight: QuantisedWeight, tensor: QuantisedTensor, output: int = 0, first_row: int = 0
) -> None:
    """Load rows of a checkpoint's tensor from `first_row` as outputs from `output`."""
    bad_row = weight.load(output, tensor)
    if bad_row is not None:
        raise StartupError(
            f"tensor '{name}': row {first_row + bad_row} has an infinite or NaN scale or minimum in a "
            f"{tensor.format.name} block: the file is corrupt; download or convert it again."
        )


def _load_quantised(name: str, weight: QuantisedWeight, tensor: Tensor, output: int, first_row: int) -> None:
    for start, rows in quantised_slices(tensor, weight.format):
        bad_row = weight.load(output + start, rows)
        if bad_row is not None:
            raise StartupError(
                f"tensor '{name}': output {first_row + start + bad_row} has a weight that is infinite, not a number or "
                f"too large for {weight.format.name} blocks: download the checkpoint again, or omit --quantization."
            )
