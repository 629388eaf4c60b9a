"""`Drafter`: makes the drafts of a step with a second, smaller model, before the target model verifies them.

A plan has placeholders for drafts. The draft model first computes all tokens that have no KV in its cache, prompts
included, then drafts one token per sequence at a time, always the likeliest. Outputs do not depend on the draft model:
a draft is accepted only if the target model chooses the same token.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_engine.devices.device import Device
from octavo_engine.ops.attention import AttentionBackend
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.graphed_model import GraphedModel, LoadedModel
from octavo_engine.runner.memory_plan import MemoryPlan
from octavo_engine.runner.step_costs import CostMeter
from octavo_engine.settings.config import EngineConfig, batched_tokens
from octavo_engine.settings.speculative import MAX_DRAFT_TOKENS
from octavo_engine.wire.plan import SeqId, SeqResult, SeqStep, StepCosts, StepPlan

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]  # the block of each part of a sequence


class DraftCache:
    """The draft model's KV cache, whose blocks have the same ids as the target model's.

    Block tables, prefix hits, copies and swaps of the target model thus serve both models. The draft model does not run
    in steps without drafts, so a block may have draft model KV for fewer tokens than target model KV: `_filled` counts
    these tokens from the block's start. `make_host` allocates rows for swapping; it returns None without a host tier.
    """

    def __init__(
        self, backend: AttentionBackend, *, block_size: int, num_blocks: int, make_host: Callable[[], Tensor | None]
    ) -> None:
        self.backend = backend
        self._block_size, self._num_blocks = block_size, num_blocks
        self._make_host = make_host
        self.allocate()

    def allocate(self) -> None:
        self.backend.allocate(self._num_blocks)
        self._host = self._make_host()
        self._filled = np.zeros(self._num_blocks, dtype=np.int64)
        self._host_filled = np.zeros(0 if self._host is None else len(self._host), dtype=np.int64)

    def release(self) -> None:
        self.backend.release()
        self._host = None

    def swap_blocks(self, plan: StepPlan) -> None:
        assert self._host is not None, "a plan swaps, but there is no host tier"
        if plan.swap_out:
            self.backend.swap_out(plan.swap_out, self._host)
            _move(self._filled, self._host_filled, plan.swap_out)
        if plan.swap_in:
            self.backend.swap_in(plan.swap_in, self._host)
            _move(self._host_filled, self._filled, plan.swap_in)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.backend.copy_blocks(pairs)
        _move(self._filled, self._filled, pairs)

    def forget(self, blocks: Ints, offsets: Ints) -> None:
        """Forget each block's KV from its offset on: another token will be written there."""
        self._filled[blocks] = np.minimum(self._filled[blocks], offsets)

    def find_missing(self, table: Table, end: int) -> int:
        """Return the first position of a sequence, up to `end`, whose token has no KV."""
        filled = self._filled[table[: -(-end // self._block_size)]]
        short = np.flatnonzero(filled < self._block_size)
        return min(end, int(short[0]) * self._block_size + int(filled[short[0]])) if len(short) else end

    def fill(self, table: Table, start: int, filled: int, end: int) -> None:
        """Record that tokens [start, filled) of a sequence now have KV and that [filled, end) have none. All tokens
        before `start` must have KV."""
        blocks = np.arange(start // self._block_size, -(-end // self._block_size))
        self._filled[table[blocks]] = np.clip(filled - blocks * self._block_size, 0, self._block_size)


def _move(source: Ints, target: Ints, pairs: list[tuple[int, int]]) -> None:
    sources, targets = zip(*pairs, strict=True)
    target[list(targets)] = source[list(sources)]


class Drafter:
    """Drafts tokens. `max_tokens`: most tokens per pass; sequences whose KV is then incomplete get no drafts."""

    def __init__(
        self,
        draft: LoadedModel,
        cache: DraftCache,
        batch: PersistentBatch,
        device: Device,
        *,
        max_tokens: int,
        enforce_eager: bool,
    ) -> None:
        self._device, self._batch = device, batch
        self.model = GraphedModel(draft.model, device, batch.limits, enforce_eager=enforce_eager)
        self._reload = draft.reload
        self.cache = cache
        self._max_tokens = max_tokens
        self._costs = CostMeter()

    def reload_model(self) -> None:
        self.model.replace(self._reload())

    def draft(self, plan: StepPlan) -> StepPlan:
        """Compute the draft model's part of a step; return the plan with drafts in place of placeholders."""
        steps = [step for step in plan.seqs if step.num_tokens]
        starts = np.array([step.start for step in steps], dtype=np.int64)
        self.cache.forget(
            self._batch.blocks_at([step.seq_id for step in steps], starts), starts % self._batch.block_size
        )
        missing = self._missing_tokens([step for step in steps if step.num_tokens > 1 or step.draft_token_ids])
        drafting = {step.seq_id: step for step in steps if step.draft_token_ids}
        drafts: dict[SeqId, list[int]] = {seq_id: [] for seq_id in drafting}
        while missing:
            chosen = self._compute(missing, drafting)
            missing = []
            for seq_id, token in chosen.items():
                position = drafting[seq_id].start + 1 + len(drafts[seq_id])
                drafts[seq_id].append(token)
                self._batch.seqs[seq_id].token_ids[position] = token
                if len(drafts[seq_id]) < len(drafting[seq_id].draft_token_ids):
                    missing.append(SeqStep(seq_id=seq_id, start=position, num_tokens=1, sample=True))
        if not drafts:
            return plan
        return replace(plan, seqs=[replace(s, draft_token_ids=drafts.get(s.seq_id, [])) for s in plan.seqs])

    def record_accepted(self, plan: StepPlan, results: dict[SeqId, SeqResult]) -> None:
        """Record that accepted drafts have KV, but not a sequence's last draft, which is never an input."""
        for step in plan.seqs:
            if step.draft_token_ids:
                end = step.start + step.num_tokens
                num_computed = min(len(results[step.seq_id].token_ids), len(step.draft_token_ids)) - 1
                if num_computed > 0:
                    self.cache.fill(self._batch.table_of(step.seq_id), end, end + num_computed, end + num_computed)

    def add_costs(self, costs: StepCosts) -> StepCosts:
        """Add the draft model's costs to the target model's, once both are measured."""
        own = self._costs.current()
        if not (own.prefill_token_s and costs.prefill_token_s):
            return costs
        return replace(
            costs,
            prefill_token_s=costs.prefill_token_s + own.prefill_token_s,
            context_token_s=costs.context_token_s + own.context_token_s,
            step_s=costs.step_s + own.step_s,
            draft_token_s=own.prefill_token_s,
            draft_step_s=own.step_s,
        )

    def _missing_tokens(self, steps: list[SeqStep]) -> list[SeqStep]:
        """Return the tokens without KV that fit in a pass. A sequence with drafts samples if all of its tokens fit."""
        missing, room = [], self._max_tokens
        for step in steps:
            table, end = self._batch.table_of(step.seq_id), step.start + step.num_tokens
            start = self.cache.find_missing(table, step.start)
            num_tokens = min(end - start, room)
            self.cache.fill(table, start, start + num_tokens, end)
            if num_tokens:
                sample = bool(step.draft_token_ids) and start + num_tokens == end
                missing.append(SeqStep(seq_id=step.seq_id, start=start, num_tokens=num_tokens, sample=sample))
            room -= num_tokens
        return missing

    def _compute(self, steps: list[SeqStep], drafting: dict[SeqId, SeqStep]) -> dict[SeqId, int]:
        """Compute tokens; return the likeliest next token of each sequence that samples."""
        started = time.perf_counter()
        inputs = self._batch.inputs(StepPlan(step_id=0, seqs=steps), self.model.place)
        assert inputs is not None, "every step computes a token"
        is_drafting = np.array([step.seq_id in drafting for step in steps])
        is_short = inputs.attention.max_query_len <= 1 + MAX_DRAFT_TOKENS  # as in the target model's steps
        hidden = self.model.forward(inputs, self.cache.backend, may_replay=is_short and bool(is_drafting.all()))
        last = inputs.first_row + inputs.num_rows - 1
        rows = {step.seq_id: row for step, row in zip(steps, last.tolist(), strict=True) if step.sample}
        tokens = self._likeliest(hidden[list(rows.values())]) if rows else []
        self._device.synchronize()
        # Tokens that earlier steps left out count as drafts, so that the step does not count as one with a prompt.
        self._costs.record_forward(
            inputs.num_rows,
            inputs.start,
            time.perf_counter() - started,
            num_drafts=np.where(is_drafting, inputs.num_rows - 1, 0),
        )
        return dict(zip(rows, tokens, strict=True))

    def _likeliest(self, hidden: Tensor) -> list[int]:
        parts = torch.split(hidden, self._batch.logit_rows)
        tokens: list[int] = torch.cat([self.model.logits(part).argmax(-1) for part in parts]).tolist()
        return tokens


def make_drafter(
    config: EngineConfig, device: Device, draft: LoadedModel, plan: MemoryPlan, batch: PersistentBatch
) -> Drafter:
    """Allocate the draft model's KV cache and make its `Drafter`."""
    backend = device.attention_backend(draft.kv_specs(), config.block_size, plan.kv_dtype)
    num_host_blocks = plan.kv.num_host_blocks

    def make_host() -> Tensor | None:
        return device.host_blocks(num_host_blocks, backend.bytes_per_block()) if num_host_blocks else None

    cache = DraftCache(backend, block_size=config.block_size, num_blocks=plan.kv.num_blocks, make_host=make_host)
    max_tokens = batched_tokens(config, device.name)
    return Drafter(draft, cache, batch, device, max_tokens=max_tokens, enforce_eager=config.enforce_eager)
