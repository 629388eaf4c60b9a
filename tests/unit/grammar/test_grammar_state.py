"""The position of a sequence in its grammar: allowed tokens, tokens that may end it, and rollback."""

import numpy as np
import pytest
from octavo_testing.grammars import EOS, OTHER_EOS, VOCAB_SIZE, WORD, allowed, state_of

A, B, C = b"abc"


def test_allowed_tokens_follow_the_output():
    state = state_of(regex="ab?c")
    assert allowed(state, b"") == [{A, WORD}]
    assert allowed(state, b"a") == [{B, C}]
    assert allowed(state, b"abc") == [{EOS}]


def test_every_stop_id_is_allowed_where_the_grammar_may_end():
    state = state_of(regex="a+", stop_ids=(EOS, OTHER_EOS, B))
    assert allowed(state, b"") == [{A}]
    assert allowed(state, b"a") == [{A, B, EOS, OTHER_EOS}]


def test_no_token_ends_a_sequence_without_stop_ids():
    assert allowed(state_of(regex="a{2}", stop_ids=()), b"aa") == [set()]


@pytest.mark.parametrize("limits", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_min_tokens_and_ignore_eos_hold_while_other_tokens_are_allowed(limits):
    state = state_of(regex="a{1,3}", **limits)
    assert allowed(state, b"a") == [{A}]
    assert EOS not in allowed(state, b"aa")[0]
    assert allowed(state, b"aaa") == [{EOS}]


def test_min_tokens_ends_at_its_count():
    state = state_of(regex="a{1,9}", min_tokens=2)
    assert allowed(state, b"a") == [{A}]
    assert allowed(state, b"aa") == [{A, EOS}]


def test_a_new_state_reaches_the_old_states_position():
    old = state_of(json={"type": "array", "items": {"type": "integer"}})
    output = b""
    for token in b"[12, 3":
        allowed(old, output)
        output += bytes((token,))
    assert allowed(state_of(json={"type": "array", "items": {"type": "integer"}}), output) == allowed(old, output)


def test_a_state_rolls_back_to_the_common_prefix():
    state = state_of(regex="a(b{3}|c{3})")
    assert allowed(state, b"abb") == [{B}]
    assert allowed(state, b"acc") == [{C}]
    assert allowed(state, b"a") == [{B, C}]
    assert allowed(state, b"") == [{A, WORD}]
    assert allowed(state, b"accc") == [{EOS}]


def test_drafts_get_a_mask_each_and_are_rolled_back():
    state = state_of(regex="ab(c|a)")
    assert allowed(state, b"a", (B, C)) == [{B}, {C, A}, {EOS}]
    assert allowed(state, b"a") == [{B}]


def test_no_token_may_follow_a_rejected_draft():
    state = state_of(regex="abc")
    assert allowed(state, b"", (A, A, B)) == [{A}, {B}, set(), set()]
    assert allowed(state, b"ab") == [{C}]


def test_a_draft_may_end_the_sequence():
    state = state_of(regex="ab")
    assert allowed(state, b"a", (B, EOS))[1] == {EOS}
    assert allowed(state, b"a") == [{B}]


def test_drafts_are_counted_up_to_the_first_that_is_forbidden_or_ends_the_output():
    state = state_of(regex="ab(c|a)b*")
    output = np.array([A], dtype=np.int32)
    counted = {(): 0, (B, C): 2, (B, B): 1, (C,): 0, (B, C, EOS, B): 2, (B, A, B, B): 4}
    assert {drafts: state.num_allowed(output, drafts) for drafts in counted} == counted
    assert allowed(state, b"a") == [{B}]
    assert state.num_allowed(np.array([C], dtype=np.int32), (A,)) == 0


def test_a_failure_after_drafts_ends_their_rows_only(monkeypatch):
    """A matcher can fail for good, for example at a limit of the library, on tokens that are then not chosen."""
    state = state_of(regex="a+b")
    finish = state.finish
    monkeypatch.setattr(state, "finish", lambda row, count: "limit" if count == 2 else finish(row, count))
    assert allowed(state, b"a", (A, A)) == [{A, B, WORD}, set(), set()]
    assert allowed(state, b"a") == [{A, B, WORD}]


def test_an_output_outside_the_grammar_is_an_error():
    state = state_of(regex="abc")
    rows = np.zeros((1, state.num_words), dtype=np.int32)
    error = state.fill(rows, np.array([A, A], dtype=np.int32))
    assert error is not None
    assert "follow its grammar" in error


def test_special_tokens_and_ids_without_a_token_are_in_no_string():
    ids = allowed(state_of(json={"type": "string"}), b'"')[0]
    assert {A, WORD, ord("<")} < ids
    assert not ids & {EOS, OTHER_EOS, VOCAB_SIZE - 1}
    assert allowed(state_of(regex="<eos>"), b"") == [{ord("<")}]


def test_forced_text_keeps_its_bytes():
    state = state_of(choice=["\N{EURO SIGN}x", "\N{EURO SIGN}y"])
    euro = "\N{EURO SIGN}".encode()
    for count in range(3):
        assert allowed(state, euro[:count]) == [{euro[count]}]
    assert allowed(state, euro) == [{ord("x"), ord("y")}]
