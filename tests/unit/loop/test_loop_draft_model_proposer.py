"""A draft model makes drafts while they pay, which is tried now and then."""

import pytest
from octavo_engine.core.sequence import Sequence, new_sequence
from octavo_engine.loop.proposers import DraftModelProposer, least_share
from octavo_engine.wire.plan import StepCosts
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams

#: A step of the target model takes 0.96 s and 0.04 s a token; one of the draft model 0.16 s and 0.01 s a token.
COSTS = StepCosts(prefill_token_s=0.05, step_s=1.12, draft_token_s=0.01, draft_step_s=0.16)
UNMEASURED = StepCosts()


def sequences(count: int, *, room: int = 100_000) -> list[Sequence]:
    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=room))
    return [new_sequence(request, seq_id=i, key=(0, 0.0, i, 0), max_len=1 << 30, now=0.0) for i in range(count)]


def steps_with_drafts(
    num_steps: int, *, accepted: int, num_seqs: int = 1, costs: StepCosts = COSTS
) -> list[tuple[int, int]]:
    """Return the steps with drafts, and how many sequences had any. Of 4 drafts, `accepted` are right."""
    proposer, seqs, found = DraftModelProposer(4), sequences(num_seqs), []
    for step in range(num_steps):
        drafts = dict(proposer.propose(seqs, costs))
        if drafts:
            found.append((step, len(drafts)))
        for seq in seqs:
            seq.num_drafts = len(drafts.get(seq.seq_id, []))
            seq.token_ids += [7] * (1 + min(accepted, seq.num_drafts))
    return found


@pytest.mark.parametrize(
    ("num_seqs", "costs", "share"),
    [
        (1, COSTS, 0.04 + 0.16 + 0.01),
        (24, COSTS, (24 * 0.04 + 0.16 + 24 * 0.01) / (0.96 + 24 * 0.04)),
        (1, StepCosts(prefill_token_s=0.08, step_s=1.92, draft_token_s=0.04, draft_step_s=0.96), 1.04),
        (9, UNMEASURED, 0),
    ],
    ids=["one", "many", "its-own-draft", "unmeasured"],
)
def test_drafts_must_also_save_the_time_of_the_draft_model(num_seqs: int, costs: StepCosts, share: float) -> None:
    assert least_share(num_seqs, costs) == pytest.approx(share)


def test_all_sequences_get_drafts_while_these_pay() -> None:
    assert steps_with_drafts(50, accepted=1) == [(step, 1) for step in range(50)]


def test_tries_that_pay_bring_drafts_back() -> None:
    """Drafts for 24 sequences pay from a share of 0.71 on; an engine starts below it."""
    found = steps_with_drafts(100, accepted=3, num_seqs=24)
    assert found == [*((step, 1) for step in range(7, 48, 8)), *((step, 24) for step in range(48, 100))]


def test_one_sequence_tries_drafts_that_do_not_pay() -> None:
    """Each try that fails doubles the steps until the next one."""
    found = steps_with_drafts(600, accepted=0, num_seqs=24)
    assert found == [(step, 1) for step in (7, 23, 55, 119, 247, 503)]


def test_a_draft_model_as_slow_as_the_target_is_not_tried() -> None:
    slow = StepCosts(prefill_token_s=0.08, step_s=1.92, draft_token_s=0.04, draft_step_s=0.96)
    assert steps_with_drafts(600, accepted=4, costs=slow) == []


def test_drafts_end_with_their_sequence() -> None:
    proposer, (seq,) = DraftModelProposer(4), sequences(1, room=4)
    for room in (3, 2, 1, 0):
        assert dict(proposer.propose([seq], UNMEASURED)) == ({seq.seq_id: [0] * room} if room else {})
        seq.token_ids.append(7)


@pytest.mark.parametrize("chosen", [[], [7]], ids=["not-scheduled", "no-room-for-drafts"])
def test_drafts_that_no_step_verified_do_not_count(chosen: list[int]) -> None:
    proposer, (seq,) = DraftModelProposer(4), sequences(1)
    for _ in range(50):
        assert dict(proposer.propose([seq], COSTS)) == {seq.seq_id: [0] * 4}
        seq.num_drafts = 0
        seq.token_ids += chosen
