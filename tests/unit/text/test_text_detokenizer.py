"""Incremental decoding by example; its law is in tests/property/test_text_detokenizer_law.py."""

import pytest
from octavo_engine.text.detokenizer import IncrementalDetokenizer
from octavo_testing.tiny_tokenizers import byte_level_tokenizer, sentence_piece_tokenizer

BYTES, PIECES = byte_level_tokenizer(), sentence_piece_tokenizer()


def _stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]


def test_a_character_appears_with_its_last_byte() -> None:
    assert _stream(IncrementalDetokenizer(BYTES), list("a🤗é".encode())) == ["a", "", "", "", "🤗", "", "é", ""]


def test_byte_tokens_wait_for_a_whole_character() -> None:
    ids = PIECES.encode("語b", add_special_tokens=False)
    assert _stream(IncrementalDetokenizer(PIECES), ids) == ["", "", "", "語", "b", ""]


def test_invalid_bytes_are_replaced_at_once() -> None:
    assert _stream(IncrementalDetokenizer(BYTES), [0xE2, 0x82, ord("a"), 0xFF]) == ["", "", "\ufffda", "\ufffd", ""]


def test_flush_replaces_an_incomplete_character_once() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(("skip", "text"), [(True, "ab<tool>"), (False, "a<|end|>b<tool>")])
def test_special_tokens_are_skipped_or_shown(skip: bool, text: str) -> None:
    ids = BYTES.encode("a<|end|>b<tool>")
    assert "".join(_stream(IncrementalDetokenizer(BYTES, skip_special_tokens=skip), ids)) == text


@pytest.mark.parametrize(
    ("prompt", "skip", "text"),
    [
        ("", True, "ab ab"),
        ("", False, " ab ab"),  # the prompt's <s> is visible text
        ("c", True, " ab ab"),
        ("c", False, " ab ab"),
    ],
)
def test_the_first_token_keeps_its_space_after_visible_text(prompt: str, skip: bool, text: str) -> None:
    detokenizer = IncrementalDetokenizer(
        PIECES, skip_special_tokens=skip, prompt_token_ids=[1, *PIECES.encode(prompt)][: None if prompt else 1]
    )
    ids = PIECES.encode("ab ab", add_special_tokens=False)
    assert "".join(_stream(detokenizer, ids)) == text


def test_a_hidden_first_token_leaves_the_space_to_the_next_token() -> None:
    ids = [PIECES.bos_token_id or 0, *PIECES.encode("ab", add_special_tokens=False)]
    assert _stream(IncrementalDetokenizer(PIECES), ids) == ["", "ab", ""]


def test_no_tokens_give_no_text() -> None:
    assert IncrementalDetokenizer(BYTES).push([]) == IncrementalDetokenizer(BYTES).flush() == ""
