"""The inputs of a step's forward pass, and the bounds of its size."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch
from octavo_engine.wire.plan import SeqStep

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of a forward pass, and the rows of each sequence.

    `steps`: the plan's entries that compute tokens, in row order. `first_row`, `num_rows`, `num_drafts` (the last ones
    of these rows) and `start` (the tokens with KV before them) have an entry for each.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    steps: list[SeqStep]
    first_row: Ints
    num_rows: Ints
    num_drafts: Ints
    start: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step. `table_width`: blocks of the longest sequence."""

    max_num_seqs: int
    max_model_len: int
    table_width: int
