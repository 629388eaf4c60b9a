"""`Stages`: pipeline parallelism; each stage computes some consecutive layers of the model.

Rank = stage * ranks per stage + place. The ranks of a stage divide each of its layers (`Group`). Ranks that have the
same place in their stages form a further group, which passes hidden states from stage to stage. The first stage has
embedding and head, and samples. A later stage receives the hidden states that the stage before it returned. The last
stage sends to the first stage the rows whose logits are needed.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_engine.ops.message_store import MEETING_TIMEOUT
from octavo_engine.ops.rank_group import LOOPBACK, Group, open_group


class Stages:
    """The stage of this rank. `num_layers`: number of layers of each stage; empty if the model has one stage. `column`:
    the ranks that have this rank's place in other stages."""

    def __init__(self, num_layers: Sequence[int] = (), column: Group | None = None) -> None:
        self.num_layers, self._column = tuple(num_layers), column or Group()
        self.index, self.size = self._column.rank, self._column.size
        self.is_first, self.is_last = self.index == 0, self.index == self.size - 1

    def share(self, num_layers: int) -> range:
        """Return this stage's layers of a model with `num_layers`."""
        if self.size == 1:
            return range(num_layers)
        first = sum(self.num_layers[: self.index])
        return range(first, first + self.num_layers[self.index])

    def receive(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Receive tensors from the stage before, in place."""
        return tuple(self._column.receive(each, self.index - 1) for each in rows)

    def send(self, *rows: Tensor) -> None:
        """Send tensors to the next stage, and wait until it has received them."""
        for each in rows:
            self._column.send(each, self.index + 1)

    def return_rows(self, hidden: Tensor, find_rows: Callable[[], npt.NDArray[np.int64]]) -> Tensor:
        """On the first stage, replace the rows of `hidden` that `find_rows` lists by the last stage's rows.
        `find_rows`: returns ascending indices.

        The first stage waits for the last one in each step, even if no row is returned, so that it never starts the
        next step early.
        """
        if self.size == 1 or not (self.is_first or self.is_last):
            return hidden
        rows = find_rows()
        is_whole = len(rows) == len(hidden)
        if self.is_last:
            self._column.send(hidden if is_whole else hidden[torch.from_numpy(rows)], 0)
            return hidden
        found = hidden if is_whole else hidden.new_empty(len(rows), hidden.shape[1])
        self._column.receive(found, self.size - 1)
        if not is_whole:
            hidden[torch.from_numpy(rows)] = found
        return hidden

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes that were sent and received since the last call."""
        taken, self._column.exchanged_bytes = self._column.exchanged_bytes, {"send": 0, "recv": 0}
        return taken["send"], taken["recv"]

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace `x` by the first stage's `x`."""
        return self._column.broadcast(x)

    def close(self) -> None:
        self._column.close()


def split_layers(layer_bytes: Sequence[int], first_bytes: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one, to minimise the bytes of the largest stage.

    `first_bytes`: what the first stage has beside layers.
    """
    sums = [0, *accumulate(layer_bytes)]
    # For each number of layers that the stages considered so far may have in all: the bytes of the largest of these
    # stages, and the number of layers of each.
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        end: (first_bytes + sums[end], (end,)) for end in range(1, len(sums))
    }
    for _ in range(num_stages - 1):
        best = {
            end: min(
                (max(largest, sums[end] - sums[start]), (*counts, end - start))
                for start, (largest, counts) in best.items()
                if start < end
            )
            for end in list(best)[1:]
        }
    return best[len(layer_bytes)][1]


def planned_ranks(rank: int, ranks_per_stage: int, num_layers: Sequence[int]) -> tuple[Group, Stages]:
    """Return the group and the stage of a rank without connections. `num_layers`: as in `Stages`."""
    stage, place = divmod(rank, ranks_per_stage)
    return Group(place, ranks_per_stage), Stages(num_layers, Group(stage, max(1, len(num_layers))))


def open_ranks(
    store: Any,
    rank: int,
    ranks_per_stage: int,
    num_layers: Sequence[int],
    timeout: timedelta,
    meeting_timeout: timedelta = MEETING_TIMEOUT,
    *,
    address: str = LOOPBACK,
    gpu: torch.device | None = None,
) -> tuple[Group, Stages]:
    """Connect a rank to the ranks of its stage, and to the ranks with its place in other stages. See `open_group`."""
    group, stages = planned_ranks(rank, ranks_per_stage, num_layers)
    connect = partial(open_group, store, timeout=timeout, meeting_timeout=meeting_timeout, address=address)
    if group.size > 1:
        group = connect(group.rank, group.size, name=f"stage-{stages.index}", gpu=gpu)
    if stages.size > 1:
        stages = Stages(num_layers, connect(stages.index, stages.size, name=f"place-{group.rank}"))
    return group, stages
