"""The method of a linear layer with block-quantised weights, and the choice of a layer's method."""

from collections.abc import Sequence

from torch import Tensor

from octavo_engine.layers.group_method import GroupMethod, bad_weight
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear_method import DenseMethod, LinearMethod, LinearSpec, PartsMethod
from octavo_engine.ops.activation import Activation
from octavo_engine.ops.group_tensor import GroupFormat, WeightFormat
from octavo_engine.ops.native_quantised import QuantisedFormat, QuantisedTensor, QuantisedWeight, native_quantised
from octavo_engine.ops.packed_linear import PackedWeight
from octavo_engine.ops.quantise import quantised_slices
from octavo_engine.wire.errors import StartupError


def linear_method(spec: LinearSpec, build: BuildContext, tied: Tensor | QuantisedWeight | None) -> LinearMethod:
    """Choose the method: for blocks or groups if the device can multiply every part of the weight, otherwise dense."""
    if isinstance(tied, QuantisedWeight):
        return QuantisedMethod(spec, build, [tied], tied=True)
    formats = part_formats(spec, build) or []
    if groups := [each for each in formats if isinstance(each, GroupFormat)]:
        return GroupMethod(spec, build, groups[0]) if tied is None else DenseMethod(spec, build, tied)
    blocks = [each for each in formats if isinstance(each, QuantisedFormat)]
    if tied is not None or not blocks:
        return DenseMethod(spec, build, tied)
    return QuantisedMethod(spec, build, empty_weights(spec, build, blocks))


def part_formats(spec: LinearSpec, build: BuildContext) -> list[WeightFormat] | None:
    """Return the parts' formats; None if a part has none, or if the parts are in groups of different formats.

    `quantise_to` does not apply to a `wide` layer (a logits head or a router of experts).
    """
    num_parts = 1 if spec.shard.inputs is None else spec.shard.group.size
    other = None if spec.wide else build.quantised_format(spec.in_features, num_parts)
    formats = [build.block_format(f"{name}.weight", spec.in_features) or other for name in spec.names]
    known = [each for each in formats if each is not None]
    is_mixed = len(set(known)) > 1 and any(isinstance(each, GroupFormat) for each in known)
    return known if len(known) == len(formats) and not is_mixed else None


def empty_weights(spec: LinearSpec, build: BuildContext, formats: Sequence[QuantisedFormat]) -> list[QuantisedWeight]:
    """Return one weight if all parts have the same format, else one per part, which cannot be gated."""
    if len(set(formats)) == 1:
        return [QuantisedWeight(formats[0], sum(spec.rank_outs), spec.rank_inputs, build.device, gated=spec.gated)]
    parts = zip(formats, spec.rank_outs, strict=True)
    return [QuantisedWeight(block_format, out, spec.rank_inputs, build.device) for block_format, out in parts]


class QuantisedMethod(PartsMethod):
    """Weights quantised in blocks: one for all parts of a layer, or one per part. The embedding loads a tied one.

    A part that is not in blocks in the checkpoint is quantised as it arrives.
    """

    def __init__(
        self, spec: LinearSpec, build: BuildContext, weights: Sequence[QuantisedWeight], *, tied: bool = False
    ) -> None:
        self.weights = weights
        formats = [(weights[i] if len(weights) > 1 else weights[0]).format for i in range(len(spec.names))]
        super().__init__(spec, build, formats, tied=tied)

    def _place(self, part: int) -> tuple[QuantisedWeight, int]:
        """Return the weight that has a part, and the part's first output in it."""
        if len(self.weights) > 1:
            return self.weights[part], 0
        return self.weights[0], sum(self.spec.rank_outs[:part])

    def _load_stored(self, name: str, part: int, tensor: QuantisedTensor, rows: range) -> None:
        weight, output = self._place(part)
        blocks = self.spec.shard.cut_inputs(
            tensor.rows[rows.start : rows.stop], tensor.format.num_values, tensor.format.num_bytes
        )
        load_blocks(name, weight, QuantisedTensor(tensor.format, blocks.contiguous()), output, rows.start)

    def _load_values(self, name: str, part: int, values: Tensor, first_row: int) -> None:
        weight, output = self._place(part)
        for start, rows in quantised_slices(values, weight.format):
            bad_row = weight.load(output + start, rows)
            if bad_row is not None:
                raise bad_weight(name, first_row + start + bad_row, f"{weight.format.name} blocks")

    def apply(self, x: Tensor) -> Tensor:
        return super().apply(self._ordered(x))

    def apply_wide(self, x: Tensor) -> Tensor:
        return super().apply_wide(self._ordered(x))

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        return super().apply_gated(self._ordered(x), activation)

    def pack(self) -> None:
        native = native_quantised(self.weights, self.bias)
        self.packed = PackedWeight(native.out_features, native.in_features, bias=self.bias, native=native)

    def weights_bytes(self) -> int:
        weights = 0 if self.tied else sum(weight.nbytes for weight in self.weights)
        return weights + self.order_bytes + (0 if self.bias is None else self.bias.nbytes)


def load_blocks(
    name: str, weight: QuantisedWeight, tensor: QuantisedTensor, output: int = 0, first_row: int = 0
) -> None:
    """Load a checkpoint's rows from `first_row` on, as outputs from `output` on."""
    bad_row = weight.load(output, tensor)
    if bad_row is not None:
        raise StartupError(
            f"tensor '{name}': row {first_row + bad_row} has an infinite or NaN scale or minimum in a "
            f"{tensor.format.name} block: the file is corrupt; download or convert it again."
        )
