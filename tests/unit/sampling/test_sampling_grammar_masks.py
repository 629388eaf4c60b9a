"""Masks that are started a step ahead equal those that the step would compute itself, or are discarded."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.sampling.grammar_masks import GrammarMasks
from octavo_engine.wire.plan import NewSeq
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.grammars import BOUNDS, COMPILER, EOS, VOCAB_SIZE

A, B, C = b"abc"


class Counted:
    """A wrapper of the worker that counts the rows that it fills."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._worker, self.num_rows = masks._worker, 0
        masks._worker = self  # type: ignore[assignment]

    def fill(self, work: list[Any], words: Any) -> None:
        self.num_rows += len(work)
        self._worker.fill(work, words)


@pytest.fixture
def masks() -> GrammarMasks:
    return GrammarMasks(COMPILER, vocab_size=VOCAB_SIZE)


def new(seq_id: int, regex: str | None, **params: Any) -> NewSeq:
    grammar = None if regex is None else GrammarSource(BOUNDS).grammar_for(StructuredOutputs(regex=regex))
    return NewSeq(
        seq_id=seq_id, token_ids=[1], num_prompt_tokens=1, params=SamplingParams(**params), seed=0, grammar=grammar,
        eos_token_id=EOS,
    )  # fmt: skip


def outputs(**texts: str) -> dict[int, np.ndarray]:
    return {int(name[1:]): np.array(list(text.encode()), dtype=np.int32) for name, text in texts.items()}


def allowed(masks: GrammarMasks, *seq_ids: int) -> list[set[int] | str | None]:
    """Return, per sequence, the tokens that may be chosen, or the error; None: any token."""
    return allowed_after_drafts(masks, *((seq_id, 0) for seq_id in seq_ids))


def allowed_after_drafts(masks: GrammarMasks, *wanted: tuple[int, int]) -> list[set[int] | str | None]:
    """Return the tokens like `allowed`, per sequence and number of its drafts before the row."""
    rows = masks.rows([seq_id for seq_id, _ in wanted], np.array([num for _, num in wanted]))
    found: list[set[int] | str | None] = [None] * len(wanted)
    if rows is not None:
        logits = torch.zeros(len(wanted), VOCAB_SIZE)
        rows.apply(logits)
        for row in rows.rows:
            found[row] = rows.errors.get(row) or set(torch.isfinite(logits[row]).nonzero()[:, 0].tolist())
    return found


def test_the_next_step_uses_masks_that_were_started_ahead(masks: GrammarMasks) -> None:
    worker = Counted(masks)
    masks.add(new(1, "abc"))
    masks.add(new(2, None))
    masks.add(new(3, "c(a|b)"))
    masks.begin(outputs(s1="", s2="", s3=""), {})
    assert allowed(masks, 1, 2, 3)[1:] == [None, {C}]
    masks.begin_next(outputs(s1="a", s2="x", s3="c"))
    masks.begin(outputs(s3="c", s1="a"), {})
    assert allowed(masks, 1, 3) == [{B}, {A, B}]
    assert allowed(masks, 3, 2, 1) == [{A, B}, None, {B}]
    assert worker.num_rows == 4


def test_unforeseen_masks_are_computed_with_the_step(masks: GrammarMasks) -> None:
    worker = Counted(masks)
    for seq_id in (1, 2):
        masks.add(new(seq_id, "[ab]{4}c"))
    masks.begin(outputs(s1="", s2=""), {})
    masks.begin_next(outputs(s1="a", s2="b"))
    masks.add(new(3, "c+"))
    masks.begin(outputs(s3="", s1="a"), {})
    assert allowed(masks, 1, 3)[1] == {C}
    assert worker.num_rows == 5
    masks.begin(outputs(s2="b"), {})
    assert allowed(masks, 2) == [{A, B, 258}]


@pytest.mark.parametrize("actual", ["a", "abb", "ac", ""])
def test_a_changed_output_gets_new_masks(masks: GrammarMasks, actual: str) -> None:
    masks.add(new(1, "a(b{3}|c{3})?"))
    masks.begin(outputs(s1=""), {})
    masks.begin_next(outputs(s1="ab"))
    masks.begin(outputs(s1=actual), {})
    expected = {"": {A, 258}, "a": {B, C, EOS}, "abb": {B}, "ac": {C}}
    assert allowed(masks, 1) == [expected[actual]]


def test_a_readmitted_sequence_has_its_own_state(masks: GrammarMasks) -> None:
    masks.add(new(1, "ab"))
    masks.begin(outputs(s1=""), {})
    masks.begin_next(outputs(s1="a"))
    masks.drop([1])
    masks.add(new(1, "ac"))
    masks.begin(outputs(s1="a"), {})
    assert allowed(masks, 1) == [{C}]


def test_no_mask_is_started_for_an_ended_sequence(masks: GrammarMasks) -> None:
    worker = Counted(masks)
    masks.add(new(1, "a"))
    masks.begin(outputs(s1="a"), {})
    assert allowed(masks, 1) == [{EOS}]
    masks.begin_next({1: np.array([A, EOS], dtype=np.int32)})
    assert worker.num_rows == 1


def test_an_error_affects_one_sequence_and_persists(masks: GrammarMasks) -> None:
    masks.add(new(1, "abc"))
    masks.add(new(2, "abc"))
    masks.begin(outputs(s1="", s2=""), {})
    masks.begin_next(outputs(s1="c", s2="a"))
    for _ in range(2):
        masks.begin(outputs(s1="c", s2="a"), {})
        wrong, right = allowed(masks, 1, 2)
        assert "follow its grammar" in str(wrong)
        assert right == {B}


def test_reasoning_is_free_and_then_the_grammar_applies(masks: GrammarMasks) -> None:
    masks.add(new(1, "ab", reasoning_end_token_id=C))
    masks.begin(outputs(s1=""), {})
    assert len(allowed(masks, 1)[0] or ()) == VOCAB_SIZE - 1
    for text, expected in (("c", {A}), ("ca", {B}), ("cab", {EOS})):
        masks.begin_next(outputs(s1=text))
        masks.begin(outputs(s1=text), {})
        assert allowed(masks, 1) == [expected]


def test_no_state_is_moved_while_the_worker_uses_it(masks: GrammarMasks) -> None:
    """A step that failed before it requested its masks leaves them in progress."""
    masks.add(new(1, "abc"))
    masks.begin(outputs(s1=""), {})
    late: Future[dict[int, str]] = Future()
    masks._step[0].done = late
    masks._thread.submit(late.set_result, {})
    masks.begin(outputs(s1="a"), {})
    assert late.done()
    assert allowed(masks, 1) == [{B}]


def test_each_draft_has_a_mask_and_drafts_end_before_a_forbidden_one(masks: GrammarMasks) -> None:
    for seq_id, regex in enumerate(("ab(c|b)c*", None, "b+", "ab")):
        masks.add(new(seq_id, regex))
    masks.begin_next(outputs(s0="a", s1="a", s2="b", s3="a"))
    drafts = {0: [B, C, A], 1: [A], 2: [C], 3: [B, EOS]}
    assert masks.begin(outputs(s0="a", s1="a", s2="b", s3="a"), drafts) == {0: [B, C], 2: [], 3: [B]}
    rows = ((3, 0), (3, 1), (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
    expected = [{B}, {EOS}, {B}, {B, C}, None, None, {C, EOS}, {B, EOS}]
    assert allowed_after_drafts(masks, *rows) == expected


@pytest.mark.parametrize("accepted", ["a", "ab", "abb", "abbc"])
def test_the_next_masks_follow_the_accepted_drafts(masks: GrammarMasks, accepted: str) -> None:
    masks.add(new(1, "a[abc]*"))
    masks.begin(outputs(s1="a"), {1: [B, B, C]})
    assert allowed_after_drafts(masks, (1, 3)) == [{A, B, C, EOS, 258}]
    masks.begin_next(outputs(s1=accepted + "a"))
    masks.begin(outputs(s1=accepted + "a"), {})
    assert allowed(masks, 1) == [{A, B, C, EOS, 258}]


def test_drafts_of_an_output_outside_its_grammar_are_dropped(masks: GrammarMasks) -> None:
    masks.add(new(1, "abc"))
    assert masks.begin(outputs(s1="c"), {1: [A, B]}) == {1: []}
    assert "follow its grammar" in str(allowed(masks, 1)[0])
