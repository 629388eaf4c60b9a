"""`Layer`: the base of all layers, a module that lists the checkpoint tensors that it loads as weight slots.

Weights are allocated empty in their final dtype and place, and are filled one tensor at a time through weight slots, so
a model never exists twice. Only a slot's `load` handles the differences between a checkpoint tensor and a weight in
memory: fused, transposed, sharded. Leaf layers define `__call__` themselves: the hooks of `nn.Module.__call__` cost as
much as a small kernel and lose the types.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo_engine.ops.group_tensor import CODE_BLOCK, GroupFormat, WeightFormat
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Settings for the layers of a model: dtype and device of the tensors, and the longest sequence to support.

    `block_formats`: formats in which tensors may stay in memory, by tensor name. `quantise_to`: the format to which
    linear layers quantise other tensors while loading; if its group size does not divide the inputs, or a rank's part
    of them, the group size is 32. `group`: the ranks that divide each layer among them. `stages`: the pipeline stages;
    each has some of the layers.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    block_formats: Mapping[str, WeightFormat] = field(default_factory=dict)
    quantise_to: WeightFormat | None = None
    group: Group = field(default_factory=Group)
    stages: Stages = field(default_factory=Stages)

    def block_format(self, name: str, in_features: int) -> WeightFormat | None:
        """Return the format in which a tensor [out, in] stays; None if it is expanded.

        A checkpoint of the bare model omits the first part of all names.
        """
        names = (name, name.partition(".")[2])
        found = next((self.block_formats[each] for each in names if each in self.block_formats), None)
        return _if_whole_blocks(found, in_features)

    def quantised_format(self, in_features: int, num_parts: int) -> WeightFormat | None:
        """Return the format to which a linear layer's tensor is quantised; None: the tensor is not quantised.

        `num_parts`: ranks that divide the tensor's inputs.
        """
        quantise_to = self.quantise_to
        if isinstance(quantise_to, GroupFormat):
            size = quantise_to.group_size
            needs_small = in_features % (size * num_parts) and in_features % (CODE_BLOCK * num_parts) == 0
            if in_features % size or needs_small:
                quantise_to = replace(quantise_to, group_size=CODE_BLOCK)
        return _if_whole_blocks(quantise_to, in_features)

    def divided_format(self, name: str, in_features: int) -> WeightFormat | None:
        """Return the format in memory of a tensor [out, in] whose inputs are divided among the ranks.

        None: the tensor is expanded.
        """
        return self.block_format(name, in_features) or self.quantised_format(in_features, self.group.size)

    def format_remedy(self, name: str, in_features: int) -> str:
        """Return the remedy, for errors, that avoids a tensor's format from `divided_format`."""
        is_stored = self.block_format(name, in_features) is not None
        return "a checkpoint in another format" if is_stored else "omit --quantization"

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)


def inputs_of_cut(weight_format: WeightFormat, in_features: int) -> int:
    """Return the unit, in inputs, in which ranks may cut a weight; they may also cut a group that has all inputs."""
    is_one_group = isinstance(weight_format, GroupFormat) and weight_format.group_size == in_features
    return CODE_BLOCK if is_one_group else weight_format.num_values


def _if_whole_blocks(block_format: WeightFormat | None, in_features: int) -> WeightFormat | None:
    return None if block_format is None or in_features % block_format.num_values else block_format


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor of the checkpoint. `load` copies it to its place; the caller checks the shape before.

    If `format` is set, `load` takes a `QuantisedTensor` or `GroupTensor` of this format, else a `Tensor`. `quantises`:
    the layer quantises this tensor while loading. `instead_of`: slots that are also filled by this tensor, if a
    checkpoint may have it instead of theirs.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[Any], object]
    format: WeightFormat | None = None
    quantises: bool = False
    instead_of: tuple[str, ...] = ()


class Layer(nn.Module):
    def weight_slots(self) -> Iterable[WeightSlot]:
        """List the slots of this layer itself, without those of its inner layers."""
        return ()

    def finish_loading(self) -> None:
        """Derive and pack weights and free the originals; called once, after all slots are loaded."""

    def weights_bytes(self) -> int:
        """Return the bytes of the layer's own weights; a tied weight counts in the layer that created it."""
        return 0
