"""All ranks append the tokens that rank 0 has chosen, and compute the drafts that it has left in the plan."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.sampling.lockstep import LockstepSampler, share_drafts
from octavo_engine.sampling.sampler import NO_TOKEN_LEFT, NOT_FINITE, ChosenTokens, SampleRows
from octavo_engine.wire.plan import SeqResult, SeqStep, StepPlan
from octavo_engine.wire.records import TokenLogprobs
from octavo_testing.ranks import run_ranks


@dataclass
class Seq:
    seq_id: int


class Chooser:
    """Stands for the sampler of rank 0; other ranks must not call it."""

    def __init__(self, chosen: ChosenTokens | None) -> None:
        self.chosen = chosen

    def sample(self, logits: object, rows: object, grammar: object) -> ChosenTokens:
        assert self.chosen is not None
        return self.chosen


def test_tokens_of_rank_0_are_those_of_all_ranks() -> None:
    none, tokens = np.zeros(3, dtype=np.int64), torch.tensor([11, 12, -1])
    seqs: Any = [Seq(4), Seq(9), Seq(5)]
    rows = SampleRows(seqs=seqs, slots=none, positions=none, num_drafts=none)
    chosen = ChosenTokens(
        rows=rows,
        on_device=tokens,
        on_host=lambda: tokens,
        errors={1: NO_TOKEN_LEFT},
        masked={},
        wanting=[0],
        logprobs=lambda: [TokenLogprobs(token_ids=[11], logprobs=[-0.5], rank=1)],
    )

    def run(group: Group) -> list[SeqResult]:
        sampler = LockstepSampler(Chooser(None if group.rank else chosen), group)  # type: ignore[arg-type]
        return sampler.sample(torch.zeros(3, 0), rows).results()

    first, second = run_ranks(2, run)
    assert first == chosen.results()
    assert [each.error for each in first] == [None, NO_TOKEN_LEFT, NOT_FINITE]
    assert [(each.seq_id, each.token_ids) for each in second] == [(4, [11]), (9, []), (5, [])]
    assert [each.error is None for each in second] == [True, False, False]


@pytest.mark.parametrize(
    "drafts",
    [[[], [7], [7, 8], [7]], [[], [], [5, 6], [4, 5, 6]], [[], [], [], []]],
    ids=["a grammar forbids some", "a draft model makes some", "a draft model makes none"],
)
def test_ranks_compute_the_drafts_of_rank_0(drafts: list[list[int]]) -> None:
    steps = [SeqStep(seq_id=i, start=3, num_tokens=1, sample=True, draft_token_ids=[7, 8, 9][:i]) for i in range(4)]
    plan = StepPlan(step_id=1, seqs=steps)
    allowed = replace(plan, seqs=[replace(s, draft_token_ids=own) for s, own in zip(steps, drafts, strict=True)])

    def run(group: Group) -> StepPlan:
        return share_drafts(group, Stages(), plan, plan if group.rank else allowed)

    assert run_ranks(2, run) == [allowed, allowed]


def test_a_plan_without_drafts_is_not_shared() -> None:
    plan = StepPlan(step_id=1, seqs=[SeqStep(seq_id=1, start=0, num_tokens=1, sample=True)])
    assert share_drafts(Group(0, 2), Stages(), plan, plan) is plan  # this group has no connections
