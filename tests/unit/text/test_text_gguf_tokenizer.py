"""Tokenizers from GGUF key-values: supported keys, and errors that name unsupported values."""

import logging
from typing import Any

import pytest
from octavo_engine.text.gguf_tokenizer import TokenType
from octavo_engine.text.pre_tokenizers import PRE_TOKENIZERS
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_tokenizers import (
    byte_level_metadata,
    byte_level_tokenizer,
    make_tokenizer,
    sentence_piece_metadata,
    sentence_piece_tokenizer,
)
from tokenizers import Regex, pre_tokenizers


def _pieces(pre: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[pre].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a  123 4", ["a", " ", " 123", " 4"]),
        ("smollm", "a  123 4", ["a", "  ", "1", "2", "3", " ", "4"]),
        ("llama-bpe", "a  12345 I'LL", ["a", " ", " ", "123", "45", " I", "'LL"]),
        ("qwen2", "a  12 I'll\n\n x", ["a", " ", " ", "1", "2", " I", "'ll", "\n\n", " x"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-llm", "x = 12日本\n", ["x", " =", " ", "12", "日本", "\n"]),
        ("deepseek-coder", "x12 + y", ["x", "1", "2", " +", " y"]),
        ("deepseek-v3", "abc 12345日本.x", ["abc", " ", "123", "45", "日本", ".x"]),
        ("falcon", "a=1234 b", ["a", "=", "123", "4", " b"]),
        ("default", "a, 1234", ["a", ",", " ", "123", "4"]),
        ("command-r", "12 ab", ["1", "2", " ab"]),
    ],
)
def test_pre_tokenizers_split_as_expected(pre: str, text: str, pieces: list[str]) -> None:
    assert _pieces(pre, text) == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_all_text(pre: str) -> None:
    text = "Hello  World's 12345 ١٢٣ été\n\n  日本 x_y-- \t\r\n🤗 '\n"
    assert "".join(_pieces(pre, text)) == text
    assert byte_level_tokenizer(pre=pre).decode(byte_level_tokenizer(pre=pre).encode(text)) == text


def test_an_unknown_pre_tokenizer_error_lists_the_supported_ones() -> None:
    with pytest.raises(StartupError, match=r"tiny\.gguf: unknown pre-tokenizer tokenizer\.ggml\.pre='klingon'.*smollm"):
        byte_level_tokenizer(pre="klingon")


def test_a_missing_pre_tokenizer_is_the_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ids = byte_level_tokenizer(pre=None).encode("1234")
    assert ids == byte_level_tokenizer(pre="default").encode("1234")
    assert "names no pre-tokenizer" in caplog.text


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "gemma4", None])
def test_other_models_are_refused(model: str | None) -> None:
    with pytest.raises(StartupError, match=r"tokenizer model .* is not supported, only 'gpt2' and 'llama'"):
        byte_level_tokenizer(model=model)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata(tokens=None), "contains no tokenizer"),
        (byte_level_metadata(tokens=[]), "contains no tokenizer"),
        (byte_level_metadata(token_type=[1]), "but 1 token types"),
        (byte_level_metadata(merges=["Ġ a", "ab"]), "the entry 'ab', which is not a pair"),
        (byte_level_metadata(merges=["zz yy"]), "tokenizer cannot be loaded: .*zz"),
        (sentence_piece_metadata(scores=[0.0]), "but 1 scores"),
        (sentence_piece_metadata(scores=None), "but 0 scores"),
    ],
)
def test_broken_vocabularies_are_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        make_tokenizer(metadata)


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize(("tokenizer", "default"), [(byte_level_tokenizer, False), (sentence_piece_tokenizer, True)])
def test_bos_and_eos_are_added_as_the_file_defines(
    tokenizer: Any, default: bool, add_bos: bool | None, add_eos: bool | None
) -> None:
    made = tokenizer(add_bos_token=add_bos, add_eos_token=add_eos)
    bare = made.encode("ab", add_special_tokens=False)
    before = [made.bos_token_id] if (default if add_bos is None else add_bos) else []
    after = [made.eos_token_id] if add_eos else []
    assert made.encode("ab") == [*before, *bare, *after]


def test_llama3_starts_with_bos_by_default() -> None:
    tokenizer = byte_level_tokenizer(pre="llama-bpe")
    assert tokenizer.encode("ab")[0] == tokenizer.bos_token_id
    assert byte_level_tokenizer(pre="llama-bpe", add_bos_token=False).encode("ab")[0] != tokenizer.bos_token_id


def test_ignore_merges_keeps_whole_words() -> None:
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    extra = {"tokens": [*tokens, "xyz"], "token_type": None}
    assert byte_level_tokenizer(pre="glm4", **extra).encode("xyz") == [len(tokens)]
    assert len(byte_level_tokenizer(pre="dbrx", **extra).encode("xyz")) == 3


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("a<|end|>b<tool>c")
    assert tokenizer.decode(ids) == "ab<tool>c"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b<tool>c"
    assert tokenizer.special_ids == {tokenizer.bos_token_id, tokenizer.eos_token_id}


def test_an_end_token_is_special_even_if_its_type_is_normal() -> None:
    tokenizer = byte_level_tokenizer(token_type=None)
    end = tokenizer.encode("<|end|>")
    assert end == [tokenizer.eos_token_id]
    assert tokenizer.decode(end) == ""


def test_ids_outside_the_vocabulary_have_no_role() -> None:
    tokenizer = byte_level_tokenizer(bos_token_id=10**6, eos_token_id=-1)
    assert tokenizer.bos_token_id is tokenizer.eos_token_id is None


def test_sentence_piece_merges_by_score_with_byte_fallback() -> None:
    tokenizer = sentence_piece_tokenizer(add_bos_token=False)
    spelled = [tokenizer.token_str(i) for i in tokenizer.encode("abc abab\n日é")]
    assert spelled == [" ab", "c", " ab", "ab", "\n", "日", "é"]
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("語")] == [b" ", *(bytes((b,)) for b in "語".encode())]


@pytest.mark.parametrize(("add_space_prefix", "first"), [(True, " a"), (None, " a"), (False, "a")])
def test_sentence_piece_adds_a_space_before_the_text(add_space_prefix: bool | None, first: str) -> None:
    tokenizer = sentence_piece_tokenizer(add_space_prefix=add_space_prefix, add_bos_token=False)
    ids = tokenizer.encode("ab")
    assert tokenizer.token_str(ids[0]).startswith(first)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(tokenizer.encode("  a")) == "  a"


def test_control_and_byte_pieces_are_never_made_by_merging() -> None:
    metadata = sentence_piece_metadata(add_bos_token=False, add_space_prefix=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens += ["<", "0x0A>", "x", "y", "xy"]
    types += [TokenType.NORMAL] * 4 + [TokenType.BYTE]
    metadata["tokenizer.ggml.scores"] += [0.0] * 5
    tokenizer = make_tokenizer(metadata)
    assert [tokenizer.token_str(i) for i in tokenizer.encode("xy")] == ["x", "y"]


@pytest.mark.parametrize(("name", "kept"), [("Phi-3-mini", ""), ("phi3", ""), ("llama", " \n")])
def test_phi3_special_tokens_absorb_whitespace(name: str, kept: str) -> None:
    metadata = sentence_piece_metadata(add_space_prefix=False, add_bos_token=False) | {"general.name": name}
    tokenizer = make_tokenizer(metadata)
    assert tokenizer.decode(tokenizer.encode("a<tool> \nb<s> \nc")) == f"a<tool>{kept}b \nc"
