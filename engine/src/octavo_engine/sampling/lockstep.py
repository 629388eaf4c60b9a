"""Keeps the ranks of a model in step: rank 0 alone samples, and all ranks append the tokens that it chooses.

All ranks run all plans, and call the model in the same order. During a step, rank 0 broadcasts its decisions: the
chosen tokens, and the drafts, which depend on grammars and on a draft model, both of which only rank 0 has.
"""

from dataclasses import replace

import torch
from torch import Tensor

from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.sampling.grammar_masks import GrammarRows
from octavo_engine.sampling.sampler import NO_TOKEN, ChosenTokens, Sampler, SampleRows
from octavo_engine.wire.plan import StepPlan


class LockstepSampler:
    """A sampler whose results have the same tokens on all ranks; log-probabilities and reasons of errors are on
    rank 0 only."""

    def __init__(self, sampler: Sampler, group: Group) -> None:
        self._sampler, self._group = sampler, group

    def sample(self, logits: Tensor, rows: SampleRows, grammar: GrammarRows | None = None) -> ChosenTokens:
        if self._group.rank == 0:
            chosen = self._sampler.sample(logits, rows, grammar)
            tokens = chosen.on_host().clone()
            tokens[list(chosen.errors)] = NO_TOKEN
            self._group.broadcast(tokens)
            return chosen
        tokens = self._group.broadcast(torch.empty(len(rows.seqs), dtype=torch.int64))
        return ChosenTokens(
            rows=rows, on_device=tokens, on_host=lambda: tokens, errors={}, masked={}, wanting=[], logprobs=list
        )


def share_drafts(group: Group, stages: Stages, plan: StepPlan, allowed: StepPlan) -> StepPlan:
    """Return the plan with the drafts of rank 0's `allowed`. A sequence has at most as many as in `plan`."""
    longest = max((len(step.draft_token_ids) for step in plan.seqs), default=0)
    if group.size == stages.size == 1 or longest == 0:
        return allowed
    drafts = [step.draft_token_ids for step in allowed.seqs]
    table = torch.tensor([[len(own), *own, *[0] * (longest - len(own))] for own in drafts])
    if stages.is_first:
        group.broadcast(table)
    rows = zip(plan.seqs, stages.broadcast(table).tolist(), strict=True)
    return replace(plan, seqs=[replace(step, draft_token_ids=row[1 : 1 + row[0]]) for step, row in rows])
