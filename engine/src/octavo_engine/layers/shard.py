"""The part of a linear layer's weight that this process holds, for tensor parallelism."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A split along outputs, inputs, or neither. Split inputs give partial sums, which the caller adds over ranks."""

    dim: Literal["out", "in"] | None = None
    rank: int = 0
    size: int = 1

    def local(self, features: int, dim: Literal["out", "in"]) -> int:
        if dim != self.dim:
            return features
        if features % self.size:
            raise StartupError(f"{features} {dim}put features cannot be split over {self.size} ranks: use a divisor.")
        return features // self.size

    def local_part(self, weight: Tensor) -> Tensor:
        """Return this rank's part of a weight [out, in]."""
        if self.dim is None:
            return weight
        return weight.chunk(self.size, 0 if self.dim == "out" else 1)[self.rank]
