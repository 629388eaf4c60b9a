"""Each sampling field against a naive reference in this file, alone and in a batch."""

from typing import Any

import numpy as np
import pytest
import torch
from octavo_engine.sampling.logit_edits import TokenCounts, TokenMasks, apply_penalties
from octavo_engine.sampling.sampler import NO_TOKEN_LEFT, NOT_FINITE, Sampler, SampleRows, SamplingColumns
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.settings.records import LogprobsMode
from octavo_engine.wire.plan import NewSeq, SeqResult
from octavo_engine.wire.sampling import SamplingParams
from torch import Tensor

VOCAB = 40
PROMPT = [3, 5, 5, 7]
OUTPUT = [5, 9, 9, 11]
EOS = 2


def sample(
    logits: Tensor, *requests: SamplingParams, seeds: list[int] | None = None, mode: LogprobsMode = "raw_logprobs"
) -> list[SeqResult]:
    """Sample one row per request, each with the same prompt and output tokens."""
    tokens = PROMPT + OUTPUT
    columns = SamplingColumns(len(requests))
    seqs = []
    for slot, params in enumerate(requests):
        new = NewSeq(seq_id=slot, token_ids=tokens, num_prompt_tokens=len(PROMPT), params=params, eos_token_id=EOS)
        row = np.array([*tokens, 0], dtype=np.int32)
        seqs.append(SeqState.from_new_seq(new, slot, row, vocab_size=logits.shape[1]))
        columns.set(seqs[-1], slot if seeds is None else seeds[slot])
    rows = SampleRows(
        seqs=seqs,
        slots=np.arange(len(requests), dtype=np.int64),
        positions=np.full(len(requests), len(tokens), dtype=np.int64),
        num_drafts=np.zeros(len(requests), dtype=np.int64),
    )
    return Sampler(columns, mode).sample(logits.clone(), rows).results()


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=100, **fields)


def tokens_of(results: list[SeqResult]) -> list[int]:
    return [token for result in results for token in result.token_ids]


def flat(**values: float) -> Tensor:
    """Return logits that are zero except for named tokens: `t7=3.0`."""
    logits = torch.zeros(1, VOCAB)
    for name, value in values.items():
        logits[0, int(name[1:])] = value
    return logits


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = flat(t31=4.0, t8=4.0, t20=4.0).repeat(3, 1)
    assert tokens_of(sample(logits, greedy(), greedy(), SamplingParams(temperature=1e-9))) == [8, 8, 8]


def test_allowed_token_ids_exclude_all_others() -> None:
    assert tokens_of(sample(flat(t8=4.0, t6=1.0), greedy(allowed_token_ids=[30, 6]))) == [6]


def test_bad_words_ban_the_last_token_after_the_others() -> None:
    logits = flat(t8=4.0, t6=1.0)
    assert tokens_of(sample(logits, greedy(bad_words_token_ids=[[8]]))) == [6]
    assert tokens_of(sample(logits, greedy(bad_words_token_ids=[[9, 11, 8]]))) == [6]
    assert tokens_of(sample(logits, greedy(bad_words_token_ids=[[11, 9, 8]]))) == [8]
    assert tokens_of(sample(logits, greedy(bad_words_token_ids=[[7, *OUTPUT, 8]]))) == [8], "prompt tokens do not count"
    assert tokens_of(sample(logits, greedy(bad_words_token_ids=[[9, 11, 30], [9, 11, 8], [11, 7]]))) == [6]


def test_a_step_looks_up_bad_words_by_their_lengths() -> None:
    """A comparison with each of 2048 words took 30 ms per token and sequence."""
    params = greedy(bad_words_token_ids=[[i, j] for i in range(30) for j in range(30)] + [[5]] * 100)
    masks = TokenMasks.from_params(params, None, vocab_size=VOCAB)
    assert masks is not None
    assert sorted(masks.bad_words) == [0, 1]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_min_tokens_ban_eos_and_stop_ids_until_reached(ignore_eos: bool) -> None:
    logits = flat(t2=9.0, t13=8.0, t6=1.0)
    more = greedy(min_tokens=len(OUTPUT) + 1, stop_token_ids=[13], ignore_eos=ignore_eos)
    enough = greedy(min_tokens=len(OUTPUT), stop_token_ids=[13], ignore_eos=ignore_eos)
    assert tokens_of(sample(logits.repeat(2, 1), more, enough)) == [6, 2]


def test_logit_bias_adds() -> None:
    assert tokens_of(sample(flat(t8=4.0, t6=1.0), greedy(logit_bias={6: 3.5, 8: -1.0}))) == [6]


def test_a_bias_does_not_bring_a_banned_token_back() -> None:
    assert tokens_of(sample(flat(t8=4.0), greedy(allowed_token_ids=[8, 9], logit_bias={30: 100.0}))) == [8]


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("frequency", [0.0, 0.9, -1.5])
@pytest.mark.parametrize("presence", [0.0, 1.1])
def test_penalties_equal_the_naive_loop(repetition: float, frequency: float, presence: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    params = greedy(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, logprobs=0)
    want = logits[0].clone()
    for token in set(PROMPT + OUTPUT):
        want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
    for token in set(OUTPUT):
        want[token] -= frequency * OUTPUT.count(token) + presence
    got = edited(logits, params)
    torch.testing.assert_close(got, want)
    assert tokens_of(sample(logits, params)) == [int(want.argmax())]


def edited(logits: Tensor, params: SamplingParams) -> Tensor:
    tokens = np.array(PROMPT + OUTPUT, dtype=np.int32)
    changed = logits.clone()
    apply_penalties(changed, [0], [TokenCounts(params, len(PROMPT)).penalty(tokens, len(tokens), 0)])
    return changed[0]


def test_penalties_touch_only_their_own_rows() -> None:
    logits = flat(t5=4.0, t6=3.9).repeat(3, 1)
    assert tokens_of(sample(logits, greedy(), greedy(presence_penalty=0.5), greedy())) == [5, 6, 5]


def test_counts_follow_rolled_back_tokens() -> None:
    counts = TokenCounts(greedy(presence_penalty=1.0), 2)
    assert counted(counts, [1, 2, 3, 3, 4]) == {1: 0, 2: 0, 3: 2, 4: 1}
    assert counted(counts, [1, 2, 3, 6]) == {1: 0, 2: 0, 3: 1, 6: 1}


def test_drafts_count_only_for_the_rows_that_follow_them() -> None:
    counts = TokenCounts(greedy(presence_penalty=1.0), 2)
    assert counted(counts, [1, 2, 3]) == {1: 0, 2: 0, 3: 1}
    assert counted(counts, [1, 2, 3, 2], num_drafts=1) == {1: 0, 2: 1, 3: 1}
    assert counted(counts, [1, 2, 3, 2, 7], num_drafts=2) == {1: 0, 2: 1, 3: 1, 7: 1}
    assert counted(counts, [1, 2, 3, 8]) == {1: 0, 2: 0, 3: 1, 8: 1}  # the first draft was replaced


def counted(counts: TokenCounts, tokens: list[int], num_drafts: int = 0) -> dict[int, int]:
    penalty = counts.penalty(np.array([*tokens, 99], dtype=np.int32), len(tokens), num_drafts)
    return dict(zip(penalty.token_ids.tolist(), penalty.counts.tolist(), strict=True))


# Distributions. `frequencies` draws with one seed per row, so a run is always the same.


def frequencies(logits: Tensor, draws: int = 4000, **fields: Any) -> Tensor:
    params = SamplingParams(max_tokens=100, **fields)
    drawn = tokens_of(sample(logits.expand(draws, -1), *[params] * draws, seeds=list(range(draws))))
    return torch.bincount(torch.tensor(drawn), minlength=logits.shape[1]).double()


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """Return the statistic and the degrees of freedom; assert that no impossible token was drawn."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1


def naive_probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Compute one row's probabilities by sorting all tokens, in float64. Equals of the last kept token are kept."""
    x = logits[0].double() / temperature
    p = x.softmax(-1)
    x = x.masked_fill(p < min_p * p.max(), float("-inf"))
    if top_k:
        x = x.masked_fill(x < x.sort(descending=True).values[top_k - 1], float("-inf"))
    p, order = x.softmax(-1).sort(descending=True)
    inside = p.cumsum(0) - p < top_p
    return x.masked_fill(x < x[order[inside]].min(), float("-inf")).softmax(-1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.8},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.7},
    ],
    ids=str,
)
def test_tokens_follow_the_distribution(fields: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    probabilities = naive_probabilities(logits, **fields)
    statistic, freedom = chi_square(frequencies(logits, **fields), probabilities)
    assert statistic <= freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations of chi square


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 2000}, {"top_k": 50, "top_p": 0.99}, {}], ids=str)
def test_a_nucleus_may_exceed_the_first_candidates(fields: dict[str, Any], spread: float) -> None:
    """Flat distributions need more than the 64 tokens that torch examines first; equals of the last one are kept."""
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)) * spread
    possible = naive_probabilities(logits, **fields) > 0
    counts = frequencies(logits, 300, **fields)
    assert counts[~possible].sum() == 0
    assert (counts[possible] > 0).sum() > 40


def test_a_vocabulary_need_not_be_a_multiple_of_a_chunk() -> None:
    logits = torch.zeros(1, 1001)
    statistic, freedom = chi_square(frequencies(logits, 6000), torch.full((1001,), 1 / 1001))
    assert statistic <= freedom + 4 * (2 * freedom) ** 0.5


MIXED = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 7, "presence_penalty": 0.4},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {3: 1.0}},
    {"temperature": 0.9, "top_k": 100, "top_p": 0.5, "allowed_token_ids": list(range(30))},
]


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_a_seeded_row_is_the_same_alone_and_in_a_batch(index: int) -> None:
    logits = torch.randn(len(MIXED), VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    requests = [SamplingParams(**fields) for fields in MIXED]
    for seed in range(40):
        crowd = sample(logits, *requests, seeds=[seed + i for i in range(len(MIXED))])
        alone = sample(logits[index : index + 1], requests[index], seeds=[seed + index])
        assert alone[0].token_ids == crowd[index].token_ids


def test_different_seeds_give_different_streams() -> None:
    logits = torch.zeros(50, 1000)
    drawn = tokens_of(sample(logits, *[SamplingParams()] * 50, seeds=list(range(50))))
    assert len(set(drawn)) > 40


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(bad: float, temperature: float) -> None:
    logits = flat(t8=4.0).repeat(3, 1)
    logits[1, 17] = bad
    results = sample(logits, *[SamplingParams(temperature=temperature, top_k=1, logprobs=1)] * 3)
    assert [r.token_ids for r in results] == [[8], [], [8]]
    assert [r.error for r in results] == [None, NOT_FINITE, None]
    assert NOT_FINITE.kind == "internal"
    assert results[1].logprobs is None


def test_a_model_may_mask_tokens_itself() -> None:
    assert tokens_of(sample(flat(t8=4.0, t9=float("-inf")), greedy())) == [8]


def test_masks_that_leave_no_token_fail_their_row_alone() -> None:
    nothing = greedy(allowed_token_ids=[8], bad_words_token_ids=[[8]])
    results = sample(flat(t8=4.0).repeat(2, 1), nothing, greedy())
    assert [r.error for r in results] == [NO_TOKEN_LEFT, None]
    assert NO_TOKEN_LEFT.kind == "invalid_request"
    assert [r.token_ids for r in results] == [[], [8]]


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    params = greedy(
        logit_bias={VOCAB: 5.0}, bad_words_token_ids=[[VOCAB + 3]], allowed_token_ids=[8, VOCAB], stop_token_ids=[99]
    )
    assert tokens_of(sample(flat(t8=4.0), params)) == [8]


def test_logprobs_are_raw_and_the_chosen_token_comes_first() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    params = greedy(logprobs=3, allowed_token_ids=[20], repetition_penalty=1.5)
    results = sample(logits, params, greedy())
    raw = logits[0].log_softmax(-1)
    best = raw.topk(3)
    (entry,) = results[0].logprobs or []
    assert entry.token_ids == [20, *best.indices.tolist()]
    assert entry.logprobs == pytest.approx([raw[20].item(), *best.values.tolist()])
    assert entry.rank == int((raw > raw[20]).sum()) + 1
    assert results[1].logprobs is None


def test_logprobs_minus_one_reports_the_whole_vocabulary() -> None:
    (result,) = sample(flat(t8=4.0), greedy(logprobs=-1))
    (entry,) = result.logprobs or []
    assert entry.token_ids == [8, 8, *[t for t in range(VOCAB) if t != 8]], "equal logits are ordered by id"
    assert entry.rank == 1


def test_logprobs_zero_reports_only_the_chosen_token() -> None:
    (result,) = sample(flat(t8=4.0), greedy(logprobs=0))
    (entry,) = result.logprobs or []
    assert entry.token_ids == [8]


def test_a_chosen_token_among_ties_outside_the_top_ranks_after_them() -> None:
    logits = flat(t31=4.0, t8=4.0, t20=4.0, t9=4.0).repeat(VOCAB, 1)
    entries = [result.logprobs for result in sample(logits, *[SamplingParams(logprobs=3, top_k=4)] * VOCAB)]
    outside = [found[0] for found in entries if found and found[0].token_ids[0] not in found[0].token_ids[1:]]
    assert {entry.rank for entry in outside} == {4}


def test_logprob_token_ids_report_these_ids_with_their_ranks() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    (result,) = sample(logits, greedy(logprob_token_ids=[5, 30]))
    (entry,) = result.logprobs or []
    raw = logits[0].log_softmax(-1)
    assert entry.token_ids == [int(raw.argmax()), 5, 30]
    assert entry.logprobs == pytest.approx(raw[entry.token_ids].tolist())
    assert entry.ranks == [1, int((raw >= raw[5]).sum()), int((raw >= raw[30]).sum())]


def test_each_logprobs_mode_reports_its_values() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    params = SamplingParams(logprobs=-1, temperature=0.5, top_k=3, logit_bias={7: 100.0})

    def reported(mode: LogprobsMode) -> dict[int, float]:
        ((entry,),) = [result.logprobs or [] for result in sample(logits, params, mode=mode)]
        return dict(zip(entry.token_ids, entry.logprobs, strict=True))

    biased = logits[0].clone()
    biased[7] += 100.0
    kept = (biased / 0.5).topk(3)
    for mode, values in (("raw_logits", logits[0]), ("raw_logprobs", logits[0].log_softmax(-1))):
        found = reported(mode)  # type: ignore[arg-type]
        assert [found[i] for i in range(VOCAB)] == pytest.approx(values.tolist(), abs=1e-5)
    for mode, values in (("processed_logits", kept.values), ("processed_logprobs", kept.values.log_softmax(-1))):
        found = reported(mode)  # type: ignore[arg-type]
        assert {i for i, value in found.items() if value > float("-inf")} == set(kept.indices.tolist())
        assert [found[i] for i in kept.indices.tolist()] == pytest.approx(values.tolist(), abs=1e-5)


def test_processed_logits_of_a_greedy_row_have_no_temperature() -> None:
    (result,) = sample(flat(t8=4.0), greedy(logprobs=1, logit_bias={8: 1.0}), mode="processed_logits")
    (entry,) = result.logprobs or []
    assert entry.logprobs == [5.0, 5.0]


def test_processed_logits_respect_top_p_and_min_p() -> None:
    logits = flat(t8=9.0, t9=8.0, t10=2.0)
    results = sample(
        logits.repeat(2, 1),
        SamplingParams(logprobs=-1, top_p=0.9),
        SamplingParams(logprobs=-1, min_p=0.3),
        mode="processed_logits",
    )
    for result in results:
        (entry,) = result.logprobs or []
        assert {i for i, v in zip(entry.token_ids, entry.logprobs, strict=True) if v > float("-inf")} == {8, 9}


@pytest.mark.parametrize(
    ("budget", "start", "forced"),
    [(4, None, True), (5, None, False), (3, 5, True), (4, 5, False), (0, 20, False), (0, 9, False)],
)
def test_the_end_of_reasoning_is_forced_after_its_budget(budget: int, start: int | None, forced: bool) -> None:
    """The output is 5, 9, 9, 11, and the last case's reasoning has ended with its token 11."""
    end = 11 if start == 9 else 30
    params = greedy(thinking_token_budget=budget, reasoning_start_token_id=start, reasoning_end_token_id=end)
    assert tokens_of(sample(flat(t8=4.0), params)) == [end if forced else 8]
