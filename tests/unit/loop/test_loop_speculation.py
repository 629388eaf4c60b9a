"""N-gram drafts: the search, and when they pay; the values of `speculative_config`."""

from typing import Any

import numpy as np
import pytest
from octavo_engine.core.sequence import Sequence, new_sequence
from octavo_engine.loop.proposers import NgramProposer, find_drafts, least_share
from octavo_engine.settings.config import steps_ahead
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import StepCosts
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams


def settings(num: int = 3, least: int = 2, most: int = 4) -> SpeculativeConfig:
    return SpeculativeConfig(num_speculative_tokens=num, prompt_lookup_min=least, prompt_lookup_max=most)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([9, 1, 2, 3, 4, 5], []),
        ([1, 2, 3, 4, 7, 2], []),
        ([1, 2, 7, 5, 1, 2, 8, 5, 6, 1, 2], [8, 5, 6]),
        ([3, 1, 2, 7, 7, 7, 4, 1, 2, 8, 8, 8, 3, 1, 2], [7, 7, 7]),
        ([1, 2, 1, 2, 1, 2], [1, 2]),
        ([5], []),
        ([5, 5], []),
        ([5, 5, 5], [5]),
    ],
    ids=["match", "none", "too-short", "latest", "longest", "overlap", "one", "two", "run"],
)
def test_drafts_follow_the_longest_earlier_match(tokens: list[int], expected: list[int]) -> None:
    assert find_drafts(np.array(tokens, dtype=np.int32), settings()) == expected


def sequence(seq_id: int, *tokens: int) -> Sequence:
    request = EngineRequest(request_id=str(seq_id), prompt_token_ids=list(tokens), params=SamplingParams())
    return new_sequence(request, seq_id=seq_id, key=(0, 0.0, 0, 0), max_len=1000, now=0.0)


def test_a_proposer_follows_its_sequences() -> None:
    proposer, seq = NgramProposer(settings()), sequence(1, 1, 2, 3, 4, 1, 2)
    assert dict(proposer.propose([seq], FREE)) == {1: [3, 4, 1]}
    seq.token_ids += [3, 9]
    assert dict(proposer.propose([seq], FREE)) == {}
    seq.token_ids += [4, 1, 2, 3] * 20
    assert dict(proposer.propose([seq], FREE)) == {1: [4, 1, 2]}
    assert dict(proposer.propose([], FREE)) == {}
    assert dict(proposer.propose([seq], FREE)) == {1: [4, 1, 2]}


FREE = StepCosts()
COSTS = StepCosts(prefill_token_s=0.04, step_s=0.96)


@pytest.mark.parametrize(
    ("num_seqs", "costs", "share"), [(1, COSTS, 0.04), (24, COSTS, 0.5), (64, COSTS, 0.727), (9, FREE, 0)], ids=str
)
def test_drafts_must_save_more_time_than_they_take(num_seqs: int, costs: StepCosts, share: float) -> None:
    assert least_share(num_seqs, costs) == pytest.approx(share, abs=0.001)


def steps_with_drafts(num_steps: int, *, right: bool, num_seqs: int = 1) -> list[tuple[int, int]]:
    """Return the steps in which a sequence that repeats one token got drafts, with their numbers.

    Each step appends one token, and as many more as there were drafts if these are right.
    """
    proposer, seqs = NgramProposer(settings(least=1)), [sequence(i, *[7] * 9) for i in range(num_seqs)]
    found = []
    for step in range(num_steps):
        drafts = dict(proposer.propose(seqs, COSTS))
        if 0 in drafts:
            found.append((step, len(drafts[0])))
        for seq in seqs:
            seq.num_drafts = len(drafts.get(seq.seq_id, []))
            seq.token_ids += [7] * (1 + seq.num_drafts * right)
    return found


def test_a_sequence_whose_drafts_fail_gets_a_single_one_now_and_then() -> None:
    found = steps_with_drafts(140, right=False)
    assert [at for at, num in found if num > 1] == list(range(8))
    assert [at for at, num in found if num == 1] == [15, 31, 63, 127]


def test_accepted_single_drafts_bring_drafts_back() -> None:
    """Drafts for 64 sequences pay from a share of 0.73 on; sequences start below it."""
    found = steps_with_drafts(40, right=True, num_seqs=64)
    assert [num for _, num in found] == [1, 1, *[3] * (len(found) - 2)]
    assert [at for at, _ in found] == [7, 15, *range(16, 40)]


def test_a_crowd_without_repetition_gets_few_drafts() -> None:
    assert sum(num for _, num in steps_with_drafts(140, right=False, num_seqs=64)) == 4


@pytest.mark.parametrize("chosen", [[], [1, 2]], ids=["not-scheduled", "no-room-for-drafts"])
def test_drafts_that_no_step_verified_do_not_count(chosen: list[int]) -> None:
    proposer, seq = NgramProposer(settings()), sequence(1, 1, 2, 3, 4, 1, 2)
    for _ in range(50):
        assert len(dict(proposer.propose([seq], COSTS))[1]) >= 2
        seq.num_drafts = 0
        seq.token_ids += chosen


@pytest.mark.parametrize(
    ("given", "most", "least"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, 4, 1),
    ],
    ids=str,
)
def test_defaults_are_those_of_vllm(given: dict[str, int], most: int, least: int) -> None:
    config = resolve_config(speculative_config={"method": "ngram", "num_speculative_tokens": 4, **given})
    assert config.speculative_config == settings(4, least, most)
    as_text = resolve_config(speculative_config='{"model": "[ngram]", "num_speculative_tokens": 4}')
    assert as_text.speculative_config == settings(4, 5, 5)


@pytest.mark.parametrize(
    "given", [{}, {"method": "draft_model"}, {"draft_tensor_parallel_size": 1}, {"revision": "r1"}]
)
def test_a_model_implies_the_method_of_draft_models(given: dict[str, Any]) -> None:
    found = resolve_config(speculative_config={"model": "org/small", "num_speculative_tokens": 4, **given})
    assert found.speculative_config == SpeculativeConfig(
        num_speculative_tokens=4, method="draft_model", model="org/small", revision=given.get("revision")
    )


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
DRAFT = {"model": "org/small", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "ngram"}, "num_speculative_tokens.* between 1 and 32"),
        ({**NGRAM, "num_speculative_tokens": 0}, "between 1 and 32, got 0"),
        ({**NGRAM, "num_speculative_tokens": 33}, "between 1 and 32, got 33"),
        ({**NGRAM, "num_speculative_tokens": "3"}, "got '3'"),
        ({**NGRAM, "num_speculative_tokens": True}, "got True"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_m.. .*at least 1, got 0"),
        (
            {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min=4 .* prompt_lookup_max=3: lower",
        ),
        ({**NGRAM, "draft_tensor_parallel_size": 1}, "no field 'draft_tensor_parallel_size'.*prompt_lookup_max"),
        ({**NGRAM, "model": "org/small"}, "model='org/small' .*method='ngram': leave"),
        ({"num_speculative_tokens": 3}, "names no method: set method='ngram'"),
        ({**DRAFT, "prompt_lookup_min": 3}, "no field 'prompt_lookup_min' for method 'draft_model'.*revision"),
        ({**DRAFT, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1, got 2: leave it out"),
        ({**DRAFT, "model": 7}, "model must be text, got 7"),
        ({**DRAFT, "revision": 7}, "revision must be text, got 7"),
        ({**DRAFT, "model": ""}, "needs a model: set it"),
        ({**DRAFT, "num_speculative_tokens": 33}, "between 1 and 32, got 33"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "needs a model: set it"),
        ("[1]", "JSON object"),
        ("{", "JSON object, got '{'"),
        *(
            ({"method": method, "num_speculative_tokens": 3}, f"method='{method}' .*: set method='ngram'")
            for method in ("eagle", "eagle3", "mtp", "medusa", "suffix", "mlp_speculator", "ngram_gpu")
        ),
    ],
    ids=str,
)
def test_other_settings_are_refused_with_a_remedy(given: Any, named: str) -> None:
    with pytest.raises(StartupError, match=f"^speculative_config.*{named}"):
        resolve_config(speculative_config=given)


def test_drafts_with_async_scheduling_are_refused() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(StartupError, match="async_scheduling does not work with speculative_config"):
        resolve_config(speculative_config=drafts, async_scheduling=True)
    assert steps_ahead(resolve_config(speculative_config=drafts), "cuda") == 0


@pytest.mark.parametrize(("given", "cpu", "cuda"), [(None, 0, 1), (True, 1, 1), (False, 0, 0)])
def test_a_step_is_planned_ahead_on_a_gpu_or_if_it_is_asked_for(given: bool | None, cpu: int, cuda: int) -> None:
    config = resolve_config(async_scheduling=given)
    assert (steps_ahead(config, "cpu"), steps_ahead(config, "cuda")) == (cpu, cuda)
