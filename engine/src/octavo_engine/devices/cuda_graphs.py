"""`GraphedSteps`: decode steps of a GPU as CUDA graphs, which repeat all launches of a forward pass by one call.

There is a graph for each of some numbers of rows. A step is copied to tensors that stay in place, and filled up with
rows that have no keys and write none. All graphs are captured before an engine is ready, the largest first, so that the
others fit into its memory.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_engine.devices.cuda_calls import Capture
from octavo_engine.devices.step_inputs import Forward, StepInputs, StepLimits
from octavo_engine.ops.attention import AttentionBackend, AttentionBatch, ForwardContext
from octavo_engine.settings.records import MAX_GRAPH_ROWS
from octavo_engine.wire.errors import first_line

_LOGGER = logging.getLogger(__name__)
MOST_KEYS = 1 << 21  # of all rows: bounds the memory of attention's partial results


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return numbers of rows: powers of two to 16, then multiples of 16 or 32, and `max_num_seqs` if it is the last."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    return [size for size in (1, 2, 4, 8, *range(16, 512, 16), *range(512, most, 32)) if size < most] + [most]


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Callable[[], None]
    hidden: Tensor


class GraphedSteps:
    """`StepGraphs` on a GPU. If one can't be captured, all steps are eager. `free_bytes`: of the GPU, for the log."""

    def __init__(
        self,
        forward: Forward,
        limits: StepLimits,
        sizes: Sequence[int],
        capture: Capture,
        device: torch.device,
        *,
        free_bytes: Callable[[], int],
    ) -> None:
        self._forward, self._capture, self._sizes = forward, capture, sorted(sizes)
        self._free_bytes = free_bytes
        most, self._most_keys = self._sizes[-1], min(MOST_KEYS, limits.max_num_seqs * limits.max_model_len)
        self._max_model_len = limits.max_model_len
        self._tokens = torch.zeros(2, most, dtype=torch.int32, device=device)  # ids and positions
        self._slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, limits.table_width, dtype=torch.int32, device=device)
        self._graphs: dict[int, Graph] = {}  # by numbers of rows

    def capture_all(self, backend: AttentionBackend) -> None:
        began_s, free_bytes = time.perf_counter(), self._free_bytes()
        try:
            graphs = {size: Graph(*self._capture(self._step(size, backend))) for size in reversed(self._sizes)}
        except RuntimeError as error:
            text = "decode steps run without CUDA graphs, so they take more time at small batches: %s"
            _LOGGER.warning(text, first_line(error))
            return
        self._graphs = graphs
        _LOGGER.info(
            "captured %d CUDA graphs of up to %d sequences in %.1f s; they take %d MiB",
            *(len(graphs), self._sizes[-1], time.perf_counter() - began_s, (free_bytes - self._free_bytes()) >> 20),
        )

    def run(self, inputs: StepInputs, context: ForwardContext) -> Tensor | None:
        batch, rows = inputs.attention, len(inputs.input_ids)
        size = next((size for size in self._sizes if size >= rows), rows)
        if size not in self._graphs or batch.max_query_len > 1 or batch.num_keys > self._most_keys:
            return None
        graph = self._graphs[size]
        self._fill(inputs, rows, size)
        graph.replay()
        return graph.hidden[:rows]

    def _fill(self, inputs: StepInputs, rows: int, size: int) -> None:
        batch = inputs.attention
        self._tokens[0, :rows].copy_(inputs.input_ids)
        self._tokens[1, :rows].copy_(inputs.positions)
        self._slots[:rows].copy_(batch.slots)
        self._slots[rows:size].fill_(-1)
        self._lengths[:rows].copy_(batch.seq_lens)
        self._lengths[rows:size].zero_()
        self._tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)

    def _step(self, size: int, backend: AttentionBackend) -> Callable[[], Tensor]:
        """Return the computation of the step that the tensors in place hold."""
        ids, positions = self._tokens[:, :size]
        batch = AttentionBatch(
            query_start=self._starts[: size + 1],
            seq_lens=self._lengths[:size],
            block_tables=self._tables[:size],
            slots=self._slots[:size],
            max_query_len=1,
            max_seq_len=self._max_model_len,
            num_keys=self._most_keys,
        )

        def compute() -> Tensor:
            backend.begin_step(batch)
            return self._forward(ids, positions, ForwardContext(batch=batch, backend=backend))

        return compute
