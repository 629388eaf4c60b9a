"""Embedding tables of tokens, and of positions for models that learn positions instead of rotating."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.layers.quantised_method import load_blocks
from octavo_engine.layers.shard import vocabulary_shares
from octavo_engine.ops.gather import TablePart, gather_rows
from octavo_engine.ops.native_linear import NativeWeight
from octavo_engine.ops.native_quantised import (
    QuantisedFormat,
    QuantisedTensor,
    QuantisedWeight,
    gather_blocks,
    native_quantised,
)
from octavo_engine.wire.errors import StartupError


class Embedding(Layer):
    """The token embeddings, which a tied head shares. Rows quantised in blocks are dequantised at lookup; a table
    quantised in groups, when it is loaded.

    Each rank has the rows of its part of the head; rows of other ranks are zero until the all-reduce.
    """

    def __init__(self, name: str, rows: int, size: int, build: BuildContext, *, scale: float = 1.0) -> None:
        super().__init__()
        self.name, self.shape, self.group = name, (rows, size), build.group
        self.rows = vocabulary_shares(build.group, rows)[build.group.rank]
        self.part = None if build.group.size == 1 else TablePart(self.rows.start, rows)
        block_format, held = build.block_format(f"{name}.weight", size), len(self.rows)
        self.weight: Tensor | QuantisedWeight = (
            QuantisedWeight(block_format, held, size, build.device)
            if isinstance(block_format, QuantisedFormat)
            else build.empty(held, size)
        )
        self.blocks: NativeWeight | None = None
        self.scale = torch.tensor(scale, dtype=build.dtype).item()  # rounded as transformers rounds it

    def __call__(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens size"]:
        """Return the embeddings of tokens in a new tensor, which the caller may change in place."""
        if self.blocks is not None:
            return self.group.all_reduce(gather_blocks(self.blocks, ids, self.scale, self.part))
        assert isinstance(self.weight, Tensor), "blocks are looked up only once loading has finished"
        return self.group.all_reduce(gather_rows(self.weight, ids, self.scale, self.part))

    def weight_slots(self) -> Iterator[WeightSlot]:
        block_format = self.weight.format if isinstance(self.weight, QuantisedWeight) else None
        yield WeightSlot(f"{self.name}.weight", self.shape, self._load, block_format)

    def _load(self, table: Tensor | QuantisedTensor) -> None:
        held = slice(self.rows.start, self.rows.stop)
        if isinstance(self.weight, QuantisedWeight):
            assert isinstance(table, QuantisedTensor)
            rows = QuantisedTensor(table.format, table.rows[held])
            load_blocks(f"{self.name}.weight", self.weight, rows, first_row=held.start)
        else:
            assert isinstance(table, Tensor)
            self.weight.copy_(table[held])

    def finish_loading(self) -> None:
        if isinstance(self.weight, QuantisedWeight):
            self.blocks = native_quantised([self.weight])

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
