"""What every layer is: a module that names the checkpoint tensors it needs and says when it has them all.

Weights are allocated empty in their final type and place, and are filled one tensor at a time through slots, so a
model never exists twice. A slot is the only thing that knows how a checkpoint tensor and a weight in memory differ:
fused, transposed, sharded. Leaf layers define `__call__` themselves: the hooks of `nn.Module.__call__` cost as much
as a small kernel, and the types get lost.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Where and in which type a model's layers make their tensors, and for how long a sequence."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor of the checkpoint. `load` copies it to its place; the caller has compared the shape."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[Tensor], object]


class Layer(nn.Module):
    def weight_slots(self) -> Iterable[WeightSlot]:
        """Of this layer itself, not of those inside it."""
        return ()

    def finish_loading(self) -> None:
        """Called once, when all slots are filled: derive, pack, drop what is no longer needed."""

    def weights_bytes(self) -> int:
        """Memory that the layer's own weights hold; a tied weight counts where it was made."""
        return 0
