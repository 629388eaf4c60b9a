"""Weights of a model that transformers builds: their names in checkpoints, and the tensors outside Octavo's layers.

While it loads a checkpoint, transformers renames tensors and merges those of experts. Octavo's layers have the new
names, and load each expert separately. For all other conversions, transformers converts whole tensors.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from octavo_engine.layers.layer import WeightSlot
from octavo_engine.models.transformers_trial import Unit
from octavo_engine.wire.errors import StartupError, first_line

#: Operations that merge the projections of experts: dimension by class.
_MERGES = ({MergeModulelist: 0, Concatenate: 1}, {MergeModulelist: 0})


class CheckpointNames:
    """Names of tensors in checkpoints of a model; a tensor may have several names."""

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def renamed(self, given: str) -> str:
        """Return the model's name for a tensor of a checkpoint, or for a part of a tensor."""
        return apply_renamings(given, self._renamings)

    def given(self, name: str) -> str:
        """Return the name under which a checkpoint would have a tensor that it lacks; its other names show the form."""
        used: list[Any] = [each.reverse_transform() for each in reversed(self._renamings) if each.was_used()]
        return apply_renamings(name, used)

    def of_experts(self, module: str) -> tuple[str, str, str] | None:
        """Return the names of an expert's gate, up and down in a module; None if a checkpoint has another form."""
        found: list[str] = []
        for target, merges in zip(("gate_up_proj", "down_proj"), _MERGES, strict=True):
            converter = self._converter_to(f"{module}.{target}")
            if converter is None:
                continue
            if {type(each): each.dim for each in converter.operations} != merges:  # type: ignore[attr-defined]
                return None
            found += [pattern.rpartition("*.")[2].removesuffix(".weight") for pattern in converter.source_patterns]
        if not found:
            return "gate_proj", "up_proj", "down_proj"  # the checkpoint has the merged tensors
        return tuple(found) if len(found) == 3 else None  # type: ignore[return-value]

    def convert(self, weights: Iterable[tuple[str, Any]], has_slot: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
        """Yield all tensors. Tensors that must be merged or split come last, and stay in memory until then.

        `has_slot`: returns True for the name of a tensor that the model loads. Raises StartupError.
        """
        waiting: dict[str, list[tuple[str, str, Tensor]]] = {}
        for given, tensor in weights:
            name, pattern = rename_source_key(given, self._renamings, self._converters)
            if pattern is None or has_slot(self.renamed(given)) or has_slot(given) or not has_slot(name):
                yield given, tensor
            else:
                waiting.setdefault(name, []).append((given, pattern, tensor))
            del tensor  # before the next one is read
        converters = {pattern: each for each in self._converters for pattern in each.source_patterns}
        for name, parts in waiting.items():
            converter = deepcopy(converters[parts[0][1]])
            for given, pattern, tensor in sorted(parts, key=lambda part: dot_natural_key(part[0])):
                converter.add_tensor(name, given, pattern, tensor)  # type: ignore[arg-type]
            try:
                made: dict[str, Any] = converter.convert(name, model=self._model, config=self._model.config)
            except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise StartupError(
                    f"tensor '{parts[0][0]}' and {len(parts) - 1} others cannot become '{name}': {first_line(error)}: "
                    "check that all weight files are there."
                ) from error
            yield from ((each, value[0] if isinstance(value, list) else value) for each, value in made.items())

    def _converter_to(self, name: str) -> WeightConverter | None:
        ends = ((each, each.target_patterns[0].replace("\\", "")) for each in self._converters)
        return next((each for each, end in ends if name.endswith(end)), None)


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A parameter or buffer of a module that is transformers' own. `name`: in the model."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.key)
        return tensor

    @property
    def is_computed(self) -> bool:
        """The tensor is in no checkpoint: the code of the family computes it."""
        return self.key in self.module._non_persistent_buffers_set


def own_tensors(model: nn.Module) -> list[OwnTensor]:
    """List the parameters and buffers outside Octavo's layers. A shared one is listed for each module that has it."""
    return [
        OwnTensor(f"{name}.{key}" if name else key, module, key)
        for name, module in model.named_modules()
        for key, tensor in chain(module._parameters.items(), module._buffers.items())
        if tensor is not None
    ]


def plain_slots(tensors: Iterable[OwnTensor], rows: Mapping[str, Unit]) -> list[WeightSlot]:
    """Return a slot for each tensor that a checkpoint has. `rows`: by name, those that a rank has of a tensor."""
    stored = {id(each.tensor): each for each in reversed([*tensors]) if not each.is_computed}
    return [_plain_slot(each, rows.get(each.name)) for each in reversed(stored.values())]


def _plain_slot(own: OwnTensor, rows: Unit | None) -> WeightSlot:
    held = own.tensor.data
    if rows is None:
        return WeightSlot(own.name, tuple(held.shape), held.copy_)
    return WeightSlot(
        own.name, (rows.count, *held.shape[1:]), lambda tensor: held.copy_(tensor[rows.own.start : rows.own.stop])
    )


def keep_wide_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Set tensors of a model without memory to fp32 if its family always computes them in fp32."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    for each in own_tensors(model) if plan else ():
        kept = next((kept for glob, kept in plan.items() if re.search(glob.replace("*", ".*"), each.name)), None)
        if kept is not None and not each.is_computed:
            each.tensor.data = each.tensor.data.to(kept)


def allocate(model: PreTrainedModel, tensors: Iterable[OwnTensor], device: torch.device) -> None:
    """Allocate tensors; let the family compute those that no checkpoint has. Raises ValueError if it leaves one unset.

    `model`: has the code that computes them.
    """
    made: dict[int, Tensor] = {}
    for each in tensors:
        old = each.tensor
        if id(old) not in made:
            new = torch.empty_like(old, device=device)
            made[id(old)] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
            made[id(old)]._is_hf_initialized = not each.is_computed  # type: ignore[attr-defined]
        setattr(each.module, each.key, made[id(old)])
    computed = [each for each in tensors if each.is_computed]
    found = [_compute(model, computed, filled_with) for filled_with in (0, 1)]
    for each, first, second in zip(computed, *found, strict=True):
        if not torch.equal(first, second):
            raise ValueError(f"its code gives no values to {each.name}")


def _compute(model: PreTrainedModel, computed: Iterable[OwnTensor], filled_with: int) -> list[Tensor]:
    """Fill tensors with a number, let the family's code set them, and return copies of them."""
    for each in computed:
        each.tensor.fill_(filled_with)
    for module in dict.fromkeys(each.module for each in computed):
        model._init_weights(module)  # type: ignore[no-untyped-call]
    return [each.tensor.clone() for each in computed]
