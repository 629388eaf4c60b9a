"""`GraphedSteps`: CUDA graphs of steps; a replay repeats all kernel launches of a forward pass with one call.

Some graphs compute a fixed number of decodes, others a fixed number of tokens in any mix of prompts, drafts and
decodes. A step is copied to tensors with fixed addresses, and padded with tokens of sequences that read and write no
KV. All graphs are captured before an engine is ready; the largest is captured first, so that the others can use its
memory.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo_engine.devices.cuda_calls import Capture, Overwrite, is_out_of_memory
from octavo_engine.devices.step_inputs import FillIn, Forward, PlacedStep, StepArrays, StepInputs, StepLimits
from octavo_engine.ops.attention import AttentionBackend, AttentionBatch, ForwardContext
from octavo_engine.settings.records import MAX_GRAPH_ROWS
from octavo_engine.wire.errors import first_line

_LOGGER = logging.getLogger(__name__)
MOST_KEYS = 1 << 21  # most keys of all rows together: limits the memory of partial attention results
_PROMPT_TOKENS = (*range(64, 513, 64), 1024, 2048)  # token counts of the graphs for steps with prompts
_CHEAP_PADDING = 64  # so many padding tokens cost little; more may be at most a quarter of the step
_NONE = np.zeros(0, dtype=np.int64)
_EMPTY = StepArrays(
    *(_NONE, _NONE, _NONE, _NONE),
    query_start=np.zeros(1, dtype=np.int32),
    seq_lens=np.zeros(0, dtype=np.int32),
    block_tables=np.zeros((0, 0), dtype=np.int32),
)


class Bucket(NamedTuple):
    """The largest step of a graph. `max_query_len`: most tokens of one sequence. `least_tokens`: tokens of the smallest
    step.

    `num_seqs`: number of sequences, including padding: at least one padding sequence if `max_query_len` > 1.
    """

    num_tokens: int
    num_seqs: int
    max_query_len: int = 1
    least_tokens: int = 1

    @property
    def sizes(self) -> list[int]:
        """Element counts of the arrays that one copy moves, in the order of `GraphedSteps._write`; block tables are not
        included."""
        return [self.num_seqs + 1, self.num_seqs, *[self.num_tokens] * 4]

    def fits(self, arrays: StepArrays) -> bool:
        return (
            self.least_tokens <= len(arrays.input_ids) <= self.num_tokens
            and len(arrays.seq_lens) <= self.num_seqs - (self.max_query_len > 1)
            and arrays.max_query_len <= self.max_query_len
        )


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the default row counts of graphs: powers of two up to 16, multiples of 16 or 32, and `max_num_seqs`."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    return [size for size in (1, 2, 4, 8, *range(16, 512, 16), *range(512, most, 32)) if size < most] + [most]


def decode_buckets(sizes: Sequence[int]) -> list[Bucket]:
    return [Bucket(size, size) for size in sizes]


def prompt_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Return the buckets for steps with any mix of sequences, up to `max_num_batched_tokens` or 2048 tokens."""
    most = min(max_num_batched_tokens, _PROMPT_TOKENS[-1])
    sizes = [*(size for size in _PROMPT_TOKENS if size < most), most]
    return [
        Bucket(size, min(size, max_num_seqs) + 1, size, max(1, size - max(_CHEAP_PADDING, size // 4))) for size in sizes
    ]


def step_buckets(sizes: Sequence[int], max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Return the buckets of all graphs, which the memory plan counts. `sizes`: numbers of decodes; if empty, those of
    `capture_sizes`."""
    decodes = decode_buckets(sizes or capture_sizes(max_num_seqs))
    return [*decodes, *prompt_buckets(max_num_seqs, max_num_batched_tokens)]


@dataclass(frozen=True, slots=True)
class Graph:
    """`hidden`: the output of a replay. `input_ids`, `positions`, `attention`: its inputs."""

    replay: Callable[[], None]
    hidden: Tensor
    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch

    def compute(self, num_tokens: int) -> Tensor:
        self.replay()
        return self.hidden[:num_tokens]


class GraphedSteps:
    """`StepGraphs` on a GPU. Steps without a graph run eagerly. `free_bytes`: returns the GPU's free memory."""

    def __init__(
        self,
        forward: Forward,
        limits: StepLimits,
        buckets: Sequence[Bucket],
        capture: Capture,
        device: torch.device,
        *,
        overwrite: Overwrite,
        free_bytes: Callable[[], int],
    ) -> None:
        self._forward, self._capture, self._buckets = forward, capture, sorted(buckets)
        self._overwrite, self._free_bytes = overwrite, free_bytes
        self._most_keys = min(MOST_KEYS, limits.max_num_seqs * limits.max_model_len)
        self._max_model_len = limits.max_model_len
        most_seqs = max(bucket.num_seqs for bucket in buckets)
        self._tables = torch.zeros(most_seqs, limits.table_width, dtype=torch.int32, device=device)
        most_numbers = max(sum(bucket.sizes) for bucket in buckets) + self._tables.numel()
        self._numbers = torch.zeros(most_numbers, dtype=torch.int32, device=device)
        self._graphs: dict[Bucket, Graph] = {}

    def capture_all(self, backend: AttentionBackend, fill_in: FillIn) -> None:
        """Capture all graphs. If memory is short, smaller graphs are tried; after any other error, no more graphs."""
        began_s, free_bytes, reason = time.perf_counter(), self._free_bytes(), ""
        for bucket in reversed(self._buckets):
            try:
                self._graphs[bucket] = self._captured(bucket, backend, fill_in)
            except RuntimeError as error:
                reason = reason or first_line(error)
                if not is_out_of_memory(error):
                    break
        if len(self._graphs) < len(self._buckets):
            text = "%d of %d CUDA graphs can't be captured, so steps of these sizes take more host time: %s"
            _LOGGER.warning(text, len(self._buckets) - len(self._graphs), len(self._buckets), reason)
        decodes, others = ([b.num_tokens for b in self._graphs if (b.max_query_len == 1) == each] for each in (1, 0))
        text = "captured %d CUDA graphs, of up to %d sequences, or of up to %d tokens, in %.1f s; they take %d MiB"
        mib = (free_bytes - self._free_bytes()) >> 20
        seconds = time.perf_counter() - began_s
        _LOGGER.info(text, len(self._graphs), max(decodes, default=0), max(others, default=0), seconds, mib)

    def place(self, arrays: StepArrays) -> PlacedStep | None:
        bucket = next((each for each in self._buckets if each in self._graphs and each.fits(arrays)), None)
        if bucket is None or arrays.num_keys > self._most_keys or arrays.positions.ndim > 1:
            return None
        self._write(bucket, arrays)
        graph, num_tokens = self._graphs[bucket], len(arrays.input_ids)
        return PlacedStep(
            input_ids=graph.input_ids[:num_tokens],
            positions=graph.positions[:num_tokens],
            attention=graph.attention,
            replay=partial(graph.compute, num_tokens),
        )

    def run(self, inputs: StepInputs, context: ForwardContext) -> Tensor | None:
        """Return None: a step that no graph has taken is eager."""

    def _write(self, bucket: Bucket, arrays: StepArrays) -> None:
        """Copy a step to the tensors in place, padded to the bucket's sizes."""
        num_seqs, num_tokens, width = len(arrays.seq_lens), len(arrays.input_ids), arrays.block_tables.shape[1]
        numbers = torch.zeros(sum(bucket.sizes) + arrays.block_tables.size, dtype=torch.int32)
        parts = numbers.split_with_sizes([*bucket.sizes, arrays.block_tables.size])
        starts, lengths, input_ids, positions, slots, seq_slots, tables = (part.numpy() for part in parts)
        starts[:num_seqs] = arrays.query_start[:-1]  # padding sequences have one token each; the last has the rest
        starts[num_seqs:] = np.arange(num_tokens, num_tokens + len(starts) - num_seqs).clip(max=bucket.num_tokens)
        starts[-1] = bucket.num_tokens
        lengths[:num_seqs] = arrays.seq_lens
        input_ids[:num_tokens], positions[:num_tokens] = arrays.input_ids, arrays.positions
        slots[:num_tokens], slots[num_tokens:] = arrays.slots, -1
        seq_slots[: len(arrays.seq_slots)] = arrays.seq_slots
        tables[:] = arrays.block_tables.ravel()
        on_device = self._numbers[: len(numbers)]
        self._overwrite(on_device, numbers)
        self._tables[:num_seqs, :width].copy_(on_device[sum(bucket.sizes) :].view(num_seqs, width))

    def _captured(self, bucket: Bucket, backend: AttentionBackend, fill_in: FillIn) -> Graph:
        """Capture the computation of the step that the tensors in place hold."""
        parts = self._numbers[: sum(bucket.sizes)].split_with_sizes(bucket.sizes)
        starts, lengths, input_ids, positions, slots, seq_slots = parts
        batch = AttentionBatch(
            query_start=starts,
            seq_lens=lengths,
            block_tables=self._tables[: bucket.num_seqs],
            slots=slots,
            max_query_len=bucket.max_query_len,
            max_seq_len=self._max_model_len,
            num_keys=self._most_keys,
        )

        def compute() -> Tensor:
            backend.begin_step(batch)
            context = ForwardContext(batch=batch, backend=backend)
            return self._forward(fill_in(input_ids, seq_slots), positions, context)

        self._write(bucket, _EMPTY)
        return Graph(*self._capture(compute), input_ids, positions, batch)
