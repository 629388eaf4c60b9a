"""A step's forward pass: its inputs, its size limits, the model that computes it, and the graphs that replay it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo_engine.ops.attention import AttentionBackend, AttentionBatch, ForwardContext
from octavo_engine.wire.plan import SeqStep

Ints = npt.NDArray[np.int64]


class StepArrays(NamedTuple):
    """The numbers of a step, on the host.

    `seq_slots`: the slot of each token's sequence, if some sequences' newest tokens are known only to the device;
    otherwise empty.
    """

    input_ids: Ints
    positions: Ints  # [rows], or [3, rows]
    slots: Ints
    seq_slots: Ints
    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start).max())

    @property
    def num_keys(self) -> int:
        return int(self.seq_lens.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """A step's inputs on the device. `replay`: computes the hidden rows with the graph that owns these tensors."""

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    replay: Callable[[], Tensor] | None = None


#: Copies a step to the tensors of a graph that can run it; returns None if no graph can.
Place = Callable[[StepArrays], PlacedStep | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of a forward pass, and the rows of each sequence.

    `steps`: the plan's entries that compute tokens, in row order. The arrays have a value per entry: `first_row`;
    `num_rows`; `num_drafts`, the number of drafts, which are the last rows; `start`, the number of tokens that already
    have KV. `replay`: see `PlacedStep`.
    """

    input_ids: Tensor  # or rows of embeddings
    positions: Tensor  # [rows], or [3, rows]: coordinates of image tokens
    attention: AttentionBatch
    steps: list[SeqStep]
    first_row: Ints
    num_rows: Ints
    num_drafts: Ints
    start: Ints
    replay: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step. `table_width`: blocks of the longest sequence."""

    max_num_seqs: int
    max_model_len: int
    table_width: int


#: A model's forward pass: token ids, positions and context to hidden rows.
Forward = Callable[[Tensor, Tensor, ForwardContext], Tensor]


#: Replaces unknown input ids by the newest token of each sequence, which is stored in the sequence's slot.
FillIn = Callable[[Tensor, Tensor], Tensor]


class Tower(Protocol):
    """A model's vision tower: it encodes images to rows that replace the embeddings of their placeholder tokens."""

    @property
    def weights_bytes(self) -> int: ...

    @property
    def activation_bytes(self) -> int:
        """The most memory that the encoding of one image takes, estimated."""
        ...

    @property
    def row_bytes(self) -> int: ...

    def named_shapes(self) -> dict[str, tuple[int, ...]]: ...

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load the weights: a value is a tensor, or `[...]` reads it. Raises StartupError."""
        ...

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor: ...


class RunnableModel(Protocol):
    """The part of a model that the runner uses."""

    tower: Tower | None

    @property
    def waiting_operator(self) -> str | None:
        """The first operator of `forward` for whose values the host waits: such steps can't be CUDA graphs."""
        ...

    def constants(self) -> Iterable[Tensor]:
        """Return tensors that keep their addresses and values from step to step."""
        ...

    def forward(self, inputs: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor: ...

    def embed(self, inputs: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class StepGraphs(Protocol):
    """The graphs of a model. They are rebuilt if the model, the KV cache's memory or the number of threads changes."""

    def capture_all(self, backend: AttentionBackend, fill_in: FillIn) -> None:
        """Capture the graphs that need no real step for it. Weights and KV cache must be allocated."""
        ...

    def place(self, arrays: StepArrays) -> PlacedStep | None:
        """Copy a step to the tensors of a graph that can run it; return None if no graph can."""
        ...

    def run(self, inputs: StepInputs, context: ForwardContext) -> Tensor | None:
        """Run a step that `may_replay`; return its hidden states, which the next step overwrites. None: run it eagerly.

        The implementation decides which steps it captures, and when, and calls `begin_step` for the steps that it runs.
        """
        ...
