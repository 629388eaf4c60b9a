"""Pieces have the tokens of the whole text, and texts are cut wherever that is provable."""

import functools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.text.gguf_tokenizer import build_gguf_backend, read_vocab
from octavo_engine.text.split_points import LONG_CHARS, MIN_CHARS, SafeSplitter
from octavo_engine.text.tokenizer import MANY_CHARS, Tokenizer
from octavo_engine.wire.errors import StartupError
from octavo_testing.chat_shapes import TOKENIZERS, TOKENS

NEAR = " ".join(TOKENS)
FILL = ("x" * MIN_CHARS, "1 " * MIN_CHARS, "ab a b " * (LONG_CHARS // 4), "12é" * LONG_CHARS, "\n" * MIN_CHARS)
FRAGMENTS = (
    *("a", "b", " ", "\n", " a", "b a", "c", "é", "b<|im_start|>", "c</s>", "<|im_end|>\n", "1", "12", " 3"),
    *TOKENS,
    *FILL,
)


@functools.cache
def known(name):
    tokenizer = TOKENIZERS[name]()
    return tokenizer, SafeSplitter.from_tokenizer(tokenizer.to_json(), NEAR)


def joined_ids(tokenizer, pieces):
    return [token_id for ids in tokenizer.encode_each(pieces, add_special_tokens=False) for token_id in ids]


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14), name=st.sampled_from([*TOKENIZERS]))
def test_pieces_have_the_tokens_of_the_whole(fragments, name):
    tokenizer, cuts = known(name)
    text = "".join(fragments)
    for pieces in (cuts.split(text), cuts.parts(text)):
        assert "".join(pieces) == text
        assert joined_ids(tokenizer, pieces) == tokenizer.encode(text, add_special_tokens=False)


@given(left=st.lists(st.sampled_from(FRAGMENTS), max_size=10), right=st.lists(st.sampled_from(FRAGMENTS), max_size=6))
def test_texts_with_a_common_beginning_are_cut_alike_there(left, right):
    _, cuts = known("byte level")
    before, after = cuts.split("".join(left)), cuts.split("".join(left + right))
    assert after[: len(before) - 1] == before[:-1]


FOUND = {
    "byte level": (True, True), "byte level, bos": (True, True), "byte level, composing": (True, True),
    "byte level, prefix space": (True, False), "unknown words": (True, False), "strips right": (True, True),
    "strips left": (False, True), "overlapping": (False, False), "single words": (False, False),
    "normalised": (False, False),
    "sentence piece": (True, False), "first word": (True, False),
}  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), FOUND.items(), ids=FOUND.keys())
def test_each_tokenizer_has_its_safe_cuts(name, expected):
    _, cuts = known(name)
    assert (cuts.special.search("<|im_start|>") is not None, cuts.cuts_words) == expected


def test_digits_are_cut_where_the_tokenizer_isolates_them():
    (_, known_digits), (_, other) = known("byte level, digits"), known("byte level")
    assert known_digits.parts("in 1999 it") == ["in ", "1", "9", "9", "9", " it"]
    assert other.parts("in 1999 it") == ["in 1999 it"]


def test_no_cut_is_made_at_a_token_that_another_may_cover():
    tokenizer, cuts = known("overlapping")
    assert cuts.special.search("<|im_start|> <|im_end|> </s>") is None
    assert cuts.special.search("[INST]") is not None
    text = "x" * MIN_CHARS + "b<|im_start|>" + "x" * MIN_CHARS + "[INST]"
    assert joined_ids(
        tokenizer, ["x" * MIN_CHARS + "b", "<|im_start|>", "x" * MIN_CHARS, "[INST]"]
    ) != tokenizer.encode(text, add_special_tokens=False)


def test_long_stretches_are_cut_between_words():
    _, cuts = known("byte level")
    text = "word and more " * 1000
    pieces = cuts.split(text)
    assert all(LONG_CHARS <= len(piece) < LONG_CHARS + 20 for piece in pieces[:-1])
    assert all(piece.startswith(" ") for piece in pieces[1:])


def test_long_stretches_of_digits_are_cut_between_them():
    (_, known_digits), (_, other) = known("byte level, digits"), known("byte level")
    text = "1234567890" * LONG_CHARS
    assert [len(piece) for piece in known_digits.split(text)] == [LONG_CHARS] * 10
    assert other.split(text) == [text]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_has_the_tokens_that_the_library_gives_it(name):
    tokenizer, _ = known(name)
    text = "In 1999 it was <|im_start|>said</s> é that " * (2 * MANY_CHARS // 40)
    for add_special_tokens in (True, False):
        (whole,) = tokenizer.encode_each([text], add_special_tokens=add_special_tokens)
        assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == whole


def test_special_tokens_absent_from_prompts_are_not_searched():
    tokenizer, _ = known("byte level")
    assert SafeSplitter.from_tokenizer(tokenizer.to_json(), "no tokens").special.search(NEAR) is None


FOLDER = Path(os.environ.get("OCTAVO_LLAMA_VOCABS", "/nonexistent"))
VOCABS = [path for path in sorted(FOLDER.glob("ggml-vocab-*.gguf")) if path.with_suffix(".gguf.inp").exists()]


@pytest.mark.skipif(not VOCABS, reason="OCTAVO_LLAMA_VOCABS names no folder with llama.cpp's vocabularies")
@pytest.mark.parametrize("path", VOCABS, ids=[path.stem for path in VOCABS])
def test_pieces_of_real_vocabularies_have_the_tokens_of_the_whole(path):
    vocab = read_vocab(read_gguf(path).metadata, path)
    try:
        backend = build_gguf_backend(vocab)
    except StartupError:
        return
    tokenizer = Tokenizer(backend, bos_token_id=vocab.id_of("bos"), eos_token_id=vocab.id_of("eos"), origin=str(path))
    tokens = [vocab.tokens[i] for i, kind in enumerate(vocab.types) if kind == 3][:200]
    cuts = SafeSplitter.from_tokenizer(tokenizer.to_json(), " ".join(tokens))
    texts = [
        *path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n"),
        *(file.read_text(encoding="utf-8") for file in sorted((FOLDER / "templates").glob("*.jinja"))[:8]),
    ]
    text = "".join(part + tokens[i % len(tokens)] * (i % 3) for i, part in enumerate(texts) if tokens) or "".join(texts)
    pieces = cuts.split(text)
    assert joined_ids(tokenizer, pieces) == tokenizer.encode(text, add_special_tokens=False)
