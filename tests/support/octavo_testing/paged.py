"""A driver for a model over a paged KV cache, without scheduler or runner: it takes tokens and returns their logits.

Blocks are allocated in a scrambled order, so that no test passes only because blocks are neighbours.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from octavo_engine.models.model import Model
from octavo_engine.ops.attention import AttentionBackend, AttentionBatch, ForwardContext
from octavo_engine.ops.reference import ReferenceBackend
from torch import Tensor


class PagedDriver:
    def __init__(
        self, model: Model, *, num_blocks: int = 64, block_size: int = 16, backend: AttentionBackend | None = None
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.backend = backend or ReferenceBackend(model.kv_specs(), block_size, model.build.dtype)
        self.backend.allocate(num_blocks)
        self.free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def feed(self, tokens: Mapping[int, Sequence[int]], *, last_only: bool = False) -> dict[int, Tensor]:
        """Run one step. Return for each sequence id fp32 logits [new tokens, vocab], or [vocab] with `last_only`."""
        ids = list(tokens)
        counts = [len(tokens[seq]) for seq in ids]
        positions = torch.cat([self._extend(seq, count) for seq, count in zip(ids, counts, strict=True)])
        inputs = torch.tensor([token for seq in ids for token in tokens[seq]])
        batch = self._batch(ids, counts, positions)
        self.backend.begin_step(batch)
        with torch.inference_mode():
            ctx = ForwardContext(batch=batch, backend=self.backend)
            hidden = self.run_model(self.model_inputs(inputs), positions, ctx)
            if last_only:
                logits = self.logits(hidden[batch.query_start[1:].long() - 1])
                return dict(zip(ids, logits, strict=True))
            return dict(zip(ids, self.logits(hidden).split(counts), strict=True))

    def run_model(self, inputs: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        hidden: Tensor = self.model(inputs, positions, ctx)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def model_inputs(self, tokens: Tensor) -> Tensor:
        """Return the model's inputs for these tokens. A subclass may return embeddings."""
        return tokens

    def release(self, seq: int) -> None:
        self.free += self.blocks.pop(seq)
        del self.lengths[seq]

    def _extend(self, seq: int, count: int) -> Tensor:
        start = self.lengths.get(seq, 0)
        blocks = self.blocks.setdefault(seq, [])
        while len(blocks) * self.block_size < start + count:
            blocks.append(self.free.pop())
        self.lengths[seq] = start + count
        return torch.arange(start, start + count)

    def _batch(self, ids: list[int], counts: list[int], positions: Tensor) -> AttentionBatch:
        width = max(len(self.blocks[seq]) for seq in ids)
        tables = torch.tensor([self.blocks[seq] + [0] * (width - len(self.blocks[seq])) for seq in ids])
        rows = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor(counts))
        slots = tables[rows, positions // self.block_size] * self.block_size + positions % self.block_size
        lengths = [self.lengths[seq] for seq in ids]
        return AttentionBatch(
            query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables.int(),
            slots=slots,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            num_keys=sum(lengths),
        )
