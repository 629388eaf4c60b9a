"""Embedding tables of tokens, and of positions for models that learn positions instead of rotating."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.layers.block_method import block_slot
from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.ops.gather import gather_rows
from octavo_engine.ops.native_blocks import BlockWeight, gather_blocks, native_blocks
from octavo_engine.ops.native_linear import NativeWeight
from octavo_engine.wire.errors import StartupError


class Embedding(Layer):
    """A table of tokens, which a tied head shares. In blocks, its rows are expanded when they are looked up."""

    def __init__(self, name: str, rows: int, size: int, build: BuildContext, *, scale: float = 1.0) -> None:
        super().__init__()
        self.name = name
        block_format = build.block_format(f"{name}.weight", size)
        self.weight: Tensor | BlockWeight = (
            build.empty(rows, size) if block_format is None else BlockWeight(block_format, rows, size, build.device)
        )
        self.blocks: NativeWeight | None = None
        self.scale = torch.tensor(scale, dtype=build.dtype).item()  # rounded as transformers rounds it

    def __call__(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens size"]:
        """Return the embeddings of tokens in a new tensor, which the caller may change in place."""
        if self.blocks is not None:
            return gather_blocks(self.blocks, ids, self.scale)
        assert isinstance(self.weight, Tensor), "blocks are looked up only once loading has finished"
        return gather_rows(self.weight, ids, self.scale)

    def rows(self, rows: range) -> Tensor | BlockWeight:
        """Return rows of the table in the same memory, for a tied head."""
        if isinstance(self.weight, Tensor):
            return self.weight[rows.start : rows.stop]
        return self.weight.outputs(rows)

    def weight_slots(self) -> Iterator[WeightSlot]:
        name = f"{self.name}.weight"
        if isinstance(self.weight, BlockWeight):
            yield block_slot(name, self.weight)
        else:
            yield WeightSlot(name, tuple(self.weight.shape), self.weight.copy_)

    def finish_loading(self) -> None:
        if isinstance(self.weight, BlockWeight):
            self.blocks = native_blocks([self.weight])

    def weights_bytes(self) -> int:
        return self.weight.nbytes


class LearnedPositions(Layer):
    """A table of learned positions. `offset`: the row of position 0 (2 in OPT)."""

    def __init__(self, name: str, num_positions: int, size: int, build: BuildContext, *, offset: int = 0) -> None:
        super().__init__()
        if build.max_model_len > num_positions:
            raise StartupError(
                f"max_model_len is {build.max_model_len}, but the model learned only {num_positions} positions: "
                f"set --max-model-len to at most {num_positions}"
            )
        self.name = name
        self.weight = build.empty(num_positions + offset, size)
        self.table = self.weight[offset:]

    def __call__(self, positions: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens size"]:
        return F.embedding(positions, self.table)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self.name}.weight", tuple(self.weight.shape), self.weight.copy_)

    def weights_bytes(self) -> int:
        return self.weight.numel() * self.weight.dtype.itemsize
