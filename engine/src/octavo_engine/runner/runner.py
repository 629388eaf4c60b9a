"""`Runner`: runs one `StepPlan`. It makes no decisions.

A step does in this order: drop sequences, add sequences, update block tables, swap out, swap in, copy blocks, run the
draft model, encode images, forward, sample, compute log-probabilities of prompts. The model's head gets only rows that
are sampled or need log-probabilities, a limited number at a time. An exception becomes an error result for the whole
step; the batch arrays stay consistent, because they change before any computation, and tokens are appended after all
computations. Only a lost device raises EngineDead. Measured times last until the device has finished.
"""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo_engine.devices.device import Device
from octavo_engine.devices.recorded_steps import may_replay
from octavo_engine.devices.step_inputs import Ints, RunnableModel, StepInputs
from octavo_engine.devices.transfers import keep
from octavo_engine.ops.attention import AttentionBackend
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.runner.adapters import Adapters
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.graphed_model import GraphedModel
from octavo_engine.runner.image_encoder import ImageEncoder
from octavo_engine.runner.pooling import Pooler
from octavo_engine.runner.step_costs import CostMeter
from octavo_engine.sampling.accepted_drafts import accept_drafts, rows_to_choose
from octavo_engine.sampling.grammar_masks import GrammarMasks
from octavo_engine.sampling.lockstep import LockstepSampler, share_drafts
from octavo_engine.sampling.logit_edits import PenaltyCounts
from octavo_engine.sampling.logprobs import prompt_logprobs
from octavo_engine.sampling.sampler import ChosenTokens, Sampler, SampleRows, isolated
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.settings.records import LogprobsMode, PoolingType
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.plan import SeqId, SeqResult, SeqStep, StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import ErrorInfo, TokenLogprobs

if TYPE_CHECKING:
    from octavo_engine.runner.drafter import Drafter

_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")


class Runner:
    """Runs plans on one model. `host`: [host blocks, bytes per block] uint8 for swapping; None without a host tier.
    `pooling`: sequences return a vector instead of tokens. `images`: set if the model has a vision tower. `group`,
    `stages`: the ranks that compute the model; only rank 0 has complete results, and later stages have none.

    `EngineMemory` removes `model` and `host` while an engine sleeps.
    """

    def __init__(
        self,
        model: RunnableModel,
        backend: AttentionBackend,
        batch: PersistentBatch,
        grammars: GrammarMasks,
        device: Device,
        *,
        host: Tensor | None = None,
        adapters: Adapters | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        enforce_eager: bool = False,
        drafter: "Drafter | None" = None,
        pooling: PoolingType | None = None,
        group: Group | None = None,
        stages: Stages | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self._device = device
        self._adapters, self._batch = adapters, batch
        self.model = GraphedModel(model, device, batch.limits, enforce_eager=enforce_eager)
        self._backend = backend
        self._grammars = grammars
        self.host = host
        self._copy = batch.copy or keep
        self._group, self._stages = group or Group(), stages or Stages()
        newest = batch.newest
        self._counts = None if newest is None else PenaltyCounts(newest.tokens, batch.vocab_size, self._copy)
        sampler = Sampler(batch.columns, logprobs_mode, copy=self._copy, fetch=device.fetch(), counts=self._counts)
        self._sampler = sampler if self._group.size == 1 else LockstepSampler(sampler, self._group)
        self._drafter = drafter
        self._pooler = None if pooling is None else Pooler(pooling)
        self._images = images
        self._costs = CostMeter()

    def replace_model(self, model: RunnableModel | None) -> None:
        """Replace the model; None also frees the adapters, which are reloaded before the next model is set."""
        if model is None and self._adapters is not None:
            self._adapters.release()
        self.release_rows()
        self.model.replace(model)

    def release_rows(self) -> None:
        """Free encoded images and counts of penalised tokens. No running sequence may continue afterwards."""
        if self._images is not None:
            self._images.clear()
        if self._counts is not None:
            self._counts.release()

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan. Raises EngineDead if the device is lost, and with several ranks for every error."""
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a plan; return a function that waits for its results. Both raise EngineDead as `run` does.

        Results must be waited for in the order of the plans. With `starts_ahead`, the next plan may start before that.
        """
        collect = self._attempt(plan, lambda: self._start(plan))
        if isinstance(collect, StepResult):
            failed = collect
            return lambda: failed
        return lambda: self._collected(plan, collect)

    def _collected(self, plan: StepPlan, collect: Callable[[], list[SeqResult]]) -> StepResult:
        results = self._attempt(plan, collect)
        if isinstance(results, StepResult):
            return results
        return self._result(plan, seqs=results)

    @torch.inference_mode()
    def _attempt(self, plan: StepPlan, work: Callable[[], T]) -> T | StepResult:
        """Do a part of a step. An exception becomes the step's result, as it must not end the engine."""
        try:
            return work()
        except EngineDead:
            raise
        except Exception as error:
            if self._device.is_lost(error):
                raise EngineDead(f"the {self._device.name} device is lost: {error}") from error
            _LOGGER.exception("step %d failed", plan.step_id)
            message = f"{type(error).__name__}: {error}"
            if self._group.size * self._stages.size > 1:  # the ranks are no longer in step
                rank = self._stages.index * self._group.size + self._group.rank
                size = self._group.size * self._stages.size
                raise EngineDead(f"rank {rank} of {size}: a step failed: {message}") from error
        self._device.release_unused_memory()  # the step's tensors have gone with the exception's traceback
        return self._result(plan, error=message)

    @torch.inference_mode()
    def warm_up(self, plans: list[StepPlan]) -> None:
        """Run plans whose time, with compilation, does not count as a cost. Raises any error of a step."""
        for plan in plans:
            self._start(plan)()
        self.capture_graphs()
        self._costs = CostMeter()

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the graphs of steps. The weights and the KV cache must be allocated."""
        self.model.capture_graphs(self._backend, self._batch.fill_in)
        if self._drafter is not None:
            self._drafter.model.capture_graphs(self._drafter.cache.backend, self._batch.fill_in)

    def _current_costs(self) -> StepCosts:
        costs = self._costs.current()
        costs = costs if self._images is None else self._images.add_costs(costs)
        return costs if self._drafter is None else self._drafter.add_costs(costs)

    def _result(self, plan: StepPlan, seqs: list[SeqResult] | None = None, error: str | None = None) -> StepResult:
        encode_s = 0.0 if self._images is None else self._images.take_seconds()
        costs = self._current_costs()
        return StepResult(
            step_id=plan.step_id,
            seqs=seqs or [],
            costs=costs,
            encode_s=encode_s,
            stage_bytes=self._stages.take_bytes(),
            error=error,
        )

    def _start(self, plan: StepPlan) -> Callable[[], list[SeqResult]]:
        self._batch.drop(plan.dropped_seqs)
        self._grammars.drop(plan.dropped_seqs)
        for new in plan.new_seqs:
            self._batch.add(new)
            self._grammars.add(new)
        self._batch.update_tables(plan)
        self._move_blocks(plan)
        plan = plan if self._adapters is None else self._batch.sort_by_adapter(plan)
        drafted = plan if self._drafter is None else self._drafter.draft(plan)
        errors = {} if self._images is None else self._images.encode(plan, self._batch.seqs, self.model.tower)
        timer = self._device.timer()
        plan = share_drafts(self._group, self._stages, plan, self._begin_masks(drafted))
        inputs = self._batch.inputs(plan, self.model.place if self._is_plain(plan) else None)
        if inputs is None:
            return list
        rows, sources = self._rows_to_choose(plan, inputs)
        hidden = self._stages.return_rows(self._forward(plan, inputs), partial(self._final_rows, inputs, sources))
        if not self._stages.is_first:
            return list
        if self._pooler is None:
            wait_for_results = self._sample(plan, rows, sources, hidden)
        else:
            self._group.wait()
            pooled = self._pooler.pool(inputs, hidden, self._batch.seqs)
            wait_for_results = lambda: pooled  # noqa: E731
        prompt_logprobs, logprobs_s = self._timed_prompt_logprobs(inputs, hidden, errors)
        timer.stop()

        def collect() -> list[SeqResult]:
            self._group.wait()
            results = wait_for_results()
            if self._drafter is not None:
                self._drafter.record_accepted(plan, results)
            for seq_id, logprobs in prompt_logprobs.items():
                results.setdefault(seq_id, SeqResult(seq_id=seq_id, token_ids=[])).prompt_logprobs = logprobs
            results |= {i: SeqResult(seq_id=i, token_ids=[], error=error) for i, error in errors.items()}
            forward_s = max(timer.seconds() - logprobs_s, 1e-6)
            self._costs.record_forward(inputs.num_rows, inputs.start, forward_s, num_drafts=inputs.num_drafts)
            return list(results.values())

        return collect

    def _is_plain(self, plan: StepPlan) -> bool:
        """Return True if the forward pass reads nothing but tokens, positions and the KV cache."""
        if self._adapters is not None and self._batch.has_adapters(plan):
            return False
        return self._images is None or not self._images.has_rows(plan, self._batch.seqs)

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        if self._images is not None:
            embeddings = self._images.embed(inputs, self._batch.seqs, self.model.embed)
            if embeddings is not None:
                return self.model.forward(replace(inputs, input_ids=embeddings), self._backend, may_replay=False)
        rows = {} if self._adapters is None else self._batch.adapter_rows(inputs)
        with self._adapters.applied(rows) if self._adapters is not None else nullcontext():
            is_plain = not rows and inputs.positions.dim() == 1
            return self.model.forward(inputs, self._backend, may_replay=is_plain and may_replay(plan))

    def _begin_masks(self, plan: StepPlan) -> StepPlan:
        """Start the masks of grammars; return the plan without drafts that they forbid."""
        sampling = [step for step in plan.seqs if step.sample]
        if not sampling:
            return plan
        shaped = [step for step in sampling if step.seq_id in self._grammars]
        drafts = {step.seq_id: step.draft_token_ids for step in shaped if step.draft_token_ids}
        seqs = self._batch.seqs
        allowed = self._grammars.begin(
            {s.seq_id: seqs[s.seq_id].output(s.start + s.num_tokens) for s in shaped}, drafts
        )
        if not allowed:
            return plan
        cut = [replace(s, draft_token_ids=allowed.get(s.seq_id, s.draft_token_ids)) for s in plan.seqs]
        return replace(plan, seqs=cut)

    def _move_blocks(self, plan: StepPlan) -> None:
        if plan.swap_out or plan.swap_in:
            assert self.host is not None, "a plan swaps, but there is no host tier"
            started = time.perf_counter()
            if plan.swap_out:
                self._backend.swap_out(plan.swap_out, self.host)
            if plan.swap_in:
                self._backend.swap_in(plan.swap_in, self.host)
            if self._drafter is not None:
                self._drafter.cache.swap_blocks(plan)
            self._device.synchronize()
            self._costs.record_swap(len(plan.swap_out) + len(plan.swap_in), time.perf_counter() - started)
        if plan.copies:
            self._backend.copy_blocks(plan.copies)
            if self._drafter is not None:
                self._drafter.cache.copy_blocks(plan.copies)

    def _rows_to_choose(self, plan: StepPlan, inputs: StepInputs) -> tuple[SampleRows, Ints]:
        last = inputs.first_row + inputs.num_rows - inputs.num_drafts - 1
        last_row = {step.seq_id: row for step, row in zip(inputs.steps, last.tolist(), strict=True)}
        return rows_to_choose([step for step in plan.seqs if step.sample], last_row, self._batch.seqs)

    def _final_rows(self, inputs: StepInputs, sampled: Ints) -> Ints:
        """Return the ascending indices of the rows whose hidden states the first stage needs. `sampled`: the rows from
        which tokens are sampled."""
        is_used = np.zeros(len(inputs.input_ids), dtype=np.bool_)
        is_used[sampled] = True
        if self._pooler is not None and self._pooler.uses_all_rows:
            is_used[:] = True
        for step, first in zip(inputs.steps, inputs.first_row.tolist(), strict=True):
            is_used[first : first + step.num_prompt_logprobs] = True
        return np.flatnonzero(is_used)

    def _sample(
        self, plan: StepPlan, rows: SampleRows, sources: Ints, hidden: Tensor
    ) -> Callable[[], dict[SeqId, SeqResult]]:
        """Start sampling; return a function that waits for the results, by sequence id, in the order of the plan."""
        chosen = list[ChosenTokens]()
        vocab_rows = self._batch.logit_rows
        for at in range(0, len(sources), vocab_rows):
            part = rows.part(at, at + vocab_rows)
            logits = self._logits(hidden, sources[at : at + vocab_rows])
            grammar = self._grammars.rows([seq.seq_id for seq in part.seqs], part.num_drafts)
            chosen.append(self._sampler.sample(logits, part, grammar))
            self._batch.expect(part, chosen[-1].on_device)
        return partial(self._append_tokens, [step for step in plan.seqs if step.sample], chosen)

    def _append_tokens(self, sampling: list[SeqStep], chosen: list[ChosenTokens]) -> dict[SeqId, SeqResult]:
        """Wait for a step's tokens, and append them to its sequences, except sequences that a later step has dropped.

        The tokens of rejected drafts lie beyond the end of their sequence.
        """
        results, shaped = list[SeqResult](), dict[SeqId, SeqState]()
        for part in chosen:
            rows, is_held = part.rows, np.array([self._batch.seqs.get(seq.seq_id) is seq for seq in part.rows.seqs])
            results += part.results()
            self._batch.append(rows.slots[is_held], rows.positions[is_held], part.on_host().numpy()[is_held])
            shaped |= {seq.seq_id: seq for seq in compress(rows.seqs, is_held) if seq.seq_id in self._grammars}
        accepted = accept_drafts(sampling, results)
        continuing = [step for step in sampling if step.seq_id in shaped and accepted[step.seq_id].token_ids]
        ends = {s.seq_id: s.start + s.num_tokens + len(accepted[s.seq_id].token_ids) for s in continuing}
        self._grammars.begin_next({seq_id: shaped[seq_id].output(end) for seq_id, end in ends.items()})
        return accepted

    def _logits(self, hidden: Tensor, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        """Compute the logits of `rows`; forks of one row get a row each, as sampling overwrites logits."""
        if (rows[1:] <= rows[:-1]).any():
            unique, inverse = np.unique(rows, return_inverse=True)
            return self._logits(hidden, unique)[self._copy(torch.from_numpy(inverse))]
        return self.model.logits(hidden if len(rows) == len(hidden) else hidden[self._copy(torch.from_numpy(rows))])

    def _timed_prompt_logprobs(
        self, inputs: StepInputs, hidden: Tensor, errors: dict[SeqId, ErrorInfo]
    ) -> tuple[dict[SeqId, list[TokenLogprobs]], float]:
        """Return prompt log-probabilities and their seconds, which the costs of the forward pass do not include."""
        num_rows = sum([step.num_prompt_logprobs for step in inputs.steps])
        if not num_rows:
            return {}, 0.0
        self._device.synchronize()
        started = time.perf_counter()
        found = self._prompt_logprobs(inputs, hidden, errors)
        duration_s = time.perf_counter() - started
        self._costs.record_logprobs(num_rows, duration_s)
        return found, duration_s

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden: Tensor, errors: dict[SeqId, ErrorInfo]
    ) -> dict[SeqId, list[TokenLogprobs]]:
        """Return log-probabilities by sequence; add the errors of sequences that fail to `errors`."""
        return {
            step.seq_id: self._prompt_logprobs_of(step, first_row, hidden, errors)
            for step, first_row in zip(inputs.steps, inputs.first_row.tolist(), strict=True)
            if step.num_prompt_logprobs
        }

    def _prompt_logprobs_of(
        self, step: SeqStep, first_row: int, hidden: Tensor, errors: dict[SeqId, ErrorInfo]
    ) -> list[TokenLogprobs]:
        seq = self._batch.seqs[step.seq_id]
        logprobs: list[TokenLogprobs] = []
        chunk = self._batch.logit_rows
        for at in range(0, step.num_prompt_logprobs, chunk):
            end = min(at + chunk, step.num_prompt_logprobs)
            next_ids = seq.token_ids[step.start + at + 1 : step.start + end + 1].tolist()
            logits = self.model.logits(hidden[first_row + at : first_row + end])  # a collective call: all ranks make it
            if self._group.rank == 0:
                with isolated(errors, step.seq_id):
                    logprobs += prompt_logprobs(logits, next_ids, seq.params.prompt_logprobs or 0)
        return logprobs
