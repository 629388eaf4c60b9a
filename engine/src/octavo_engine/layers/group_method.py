"""The method of a linear layer with a group-quantised weight, which GPU kernels multiply without expanding it."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear_method import LinearSpec, PartsMethod
from octavo_engine.ops.activation import Activation, act_mul
from octavo_engine.ops.group_tensor import CODE_BLOCK, GroupFormat, GroupTensor, expand_groups
from octavo_engine.ops.quantise import quantised_groups
from octavo_engine.ops.triton_devices import runs_triton
from octavo_engine.wire.errors import StartupError


class GroupMethod(PartsMethod):
    """Codes and scales of all parts, with their outputs concatenated.

    A rank has whole groups of inputs; if all inputs are one group, it has a part of the group, and its scale.
    """

    def __init__(
        self, spec: LinearSpec, build: BuildContext, group_format: GroupFormat, *, place: GroupTensor | None = None
    ) -> None:
        """Build the method. `place`: the part of a larger weight to load into."""
        super().__init__(spec, build, [group_format] * len(spec.names))
        self.weight = empty_groups(spec, build, group_format) if place is None else place
        self._has_table, self._dtype = False, build.dtype
        self._input_scales: set[float | None] = set()
        is_plain = place is None and not spec.wide  # fp32 outputs, and products of all experts, need 16-bit inputs
        self.rounds_inputs = is_plain and self.weight.format.rounds_rows_of(spec.rank_inputs)
        self._fp8_product: Callable[[Tensor], Tensor] | None = None

    @property
    def expanded_bytes(self) -> int:
        """The bytes of the expanded weight in a product of many rows; 0 if the layer never expands its weight."""
        if self.rounds_inputs or self.spec.wide:
            return 0
        return math.prod(self.weight.shape) * self._dtype.itemsize

    def _load_stored(self, name: str, part: int, tensor: GroupTensor, rows: range) -> None:
        self._set_table(name, tensor.table)
        self._input_scales.add(tensor.input_scale)
        shard, outputs = self.spec.shard, slice(rows.start, rows.stop)

        def cut(values: Tensor) -> Tensor:
            size = tensor.format.group_size
            return values[:, outputs] if len(values) == 1 else shard.cut_inputs(values.t()[outputs], size).t()

        codes = shard.cut_inputs(tensor.codes[outputs], CODE_BLOCK, CODE_BLOCK // tensor.format.codes_per_byte)
        offsets = None if tensor.offsets is None else cut(tensor.offsets)
        self._copy(part, 0, replace(tensor, codes=codes, scales=cut(tensor.scales), offsets=offsets))

    def _load_values(self, name: str, part: int, values: Tensor, first_row: int) -> None:
        for start, rows in quantised_groups(values, self.weight.format, self.weight.codes.device):
            if not rows.scales.isfinite().all():
                bad_row = int((~rows.scales.isfinite()).any(0).nonzero()[0])
                raise bad_weight(name, first_row + start + bad_row, f"{rows.format.name} in groups")
            self._copy(part, start, rows)

    def _copy(self, part: int, start: int, rows: GroupTensor) -> None:
        first = sum(self.spec.rank_outs[:part]) + start
        outputs = slice(first, first + len(rows.codes))
        self.weight.codes[outputs].copy_(rows.codes)
        self.weight.scales[:, outputs].copy_(rows.scales)
        if self.weight.offsets is not None:
            assert rows.offsets is not None
            self.weight.offsets[:, outputs].copy_(rows.offsets)

    def _set_table(self, name: str, table: Tensor | None) -> None:
        if table is None:
            return
        assert self.weight.table is not None
        if self._has_table and not torch.equal(self.weight.table.cpu(), table):
            raise StartupError(
                f"tensor '{name}': its table of values (quant_map) differs from those of the other parts of the layer "
                f"({', '.join(self.spec.names)}): use another checkpoint, or --dtype float32."
            )
        self.weight.table.copy_(table)
        self._has_table = True

    def apply(self, x: Tensor) -> Tensor:
        x = self._ordered(x)
        return multiply(x, self.weight, self.bias) if self._fp8_product is None else self._fp8_product(x)

    def apply_wide(self, x: Tensor) -> Tensor:
        return multiply(self._ordered(x), self.weight, self.bias, out_dtype=torch.float32)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        return act_mul(self.apply(x), activation)

    def pack(self) -> None:
        """Choose the kernels, and compile them for all numbers of rows; weights stay as loaded.

        If all parts have the same scale for rounded inputs, it is used; otherwise each row gets a scale of its own.
        """
        if self.rounds_inputs:
            from octavo_engine.ops.triton.fp8_linear import fp8_linear, prepare_fp8  # needs Triton

            scale = next(iter(self._input_scales)) if len(self._input_scales) == 1 else None
            self._fp8_product = partial(fp8_linear, weight=prepare_fp8(self.weight, self.bias, self._dtype, scale))
        elif runs_triton(self.weight.codes):
            from octavo_engine.ops.triton.group_linear import compile_tiles

            dtype = self._dtype
            compile_tiles(self.weight, self.bias, dtype, torch.float32 if self.spec.wide else dtype)

    def weights_bytes(self) -> int:
        return self.weight.nbytes + self.order_bytes + (0 if self.bias is None else self.bias.nbytes)


def multiply(x: Tensor, weight: GroupTensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return x @ weight.T + bias. `out_dtype`: by default, the dtype of `x`."""
    if runs_triton(x):
        from octavo_engine.ops.triton.group_linear import group_linear  # Triton is missing on machines without a GPU

        return group_linear(x, weight, bias, out_dtype=out_dtype)
    dtype = out_dtype or x.dtype
    values = expand_groups(weight, x.dtype).to(dtype)
    return F.linear(x.to(dtype), values, None if bias is None else bias.to(dtype))


def bad_weight(name: str, output: int, kept: str) -> StartupError:
    return StartupError(
        f"tensor '{name}': output {output} has a weight that is infinite, not a number or too large for {kept}: "
        "download the checkpoint again, or omit --quantization."
    )


def empty_groups(spec: LinearSpec, build: BuildContext, stored: GroupFormat, *num_experts: int) -> GroupTensor:
    """Allocate this rank's weight of a layer or of several experts, with the order of inputs; values come later."""
    size, out = spec.rank_inputs, sum(spec.rank_outs)
    kept = replace(stored, group_size=size) if stored.group_size == spec.in_features else stored
    shape, scale_dtype = (*num_experts, size // kept.group_size, out), kept.scale_dtype
    offset_dtype = {"none": None, "zeros": torch.uint8, "minimums": scale_dtype}[kept.offsets]
    return GroupTensor(
        format=kept,
        codes=build.empty(*num_experts, out, size // kept.codes_per_byte, dtype=torch.uint8),
        scales=build.empty(*shape, dtype=scale_dtype),
        offsets=None if offset_dtype is None else build.empty(*shape, dtype=offset_dtype),
        table=build.empty(*num_experts, 16, dtype=torch.float32) if kept.codes == "table4" else None,
        order=build.empty(*num_experts, size, dtype=torch.int32) if kept.has_order and num_experts else None,
    )
