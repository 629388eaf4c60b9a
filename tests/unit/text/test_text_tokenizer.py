"""`Tokenizer` and `load_tokenizer`: tokenizer.json with its config, GGUF files, vocab.json with merges.txt."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.text.backend import put_around
from octavo_engine.text.gguf_tokenizer import build_gguf_backend, read_vocab
from octavo_engine.text.tokenizer import MANY_CHARS, Tokenizer, load_tokenizer
from octavo_engine.wire.errors import InvalidRequest, StartupError
from octavo_testing.tiny_tokenizers import (
    byte_level_metadata,
    byte_level_tokenizer,
    sentence_piece_metadata,
    sentence_piece_tokenizer,
    write_gguf,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

TEXTS = ["", "a", " ab  ab", "é 日本 🤗\n\n", "12<|end|>ab<tool>", "\x00\x7f\ufffd"]


def _model_files(folder: Path, *, backend: Backend | None = None, **changes: Any) -> ModelFiles:
    path = None
    if backend is not None:
        path = folder / "tokenizer.json"
        backend.save(str(path))
    fields = {"name": "m", "root": folder, "load_format": "dummy", "config": {}, "tokenizer_json": path}
    return ModelFiles(**fields | changes)


def _byte_level_backend(**changes: Any) -> Backend:
    return build_gguf_backend(read_vocab(byte_level_metadata(**changes), Path("x")))


def _sentence_piece_backend() -> Backend:
    return build_gguf_backend(read_vocab(sentence_piece_metadata(), Path("x")))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentence_piece_tokenizer()], ids=["bytes", "pieces"])
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [_byte_level_backend, _sentence_piece_backend])
def test_decode_agrees_with_the_library(make: Any, text: str, skip: bool) -> None:
    backend = make()
    ids = backend.encode(text).ids
    ours = Tokenizer(backend, bos_token_id=None, eos_token_id=None, origin="x")
    assert ours.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_broken_utf8_becomes_replacement_characters() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode([0xE2, 0x82, 97]) == "\ufffda"
    assert tokenizer.decode([0xFF, 0xFE]) == "\ufffd\ufffd"
    assert tokenizer.token_str(0xE2) == "\ufffd"


def test_ids_without_a_token_are_empty() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([97, tokenizer.vocab_size + 5, 98]) == "ab"


def test_a_gap_in_the_vocabulary_is_empty(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 5}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = load_tokenizer(_model_files(tmp_path, backend=backend))
    assert tokenizer.vocab_size == 6
    assert tokenizer.decode([0, 3, 5]) == "ab"


def test_tokens_are_found_by_name() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.token_id("<|end|>") == tokenizer.eos_token_id
    assert tokenizer.token_id("<|nothing|>") is None


def test_a_lone_surrogate_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at position 1"):
        byte_level_tokenizer().encode("a\ud83d")


@pytest.mark.parametrize(
    "model", [models.WordLevel({"a": 0}), models.WordPiece({"a": 0}), models.Unigram([("a", 0.0)])]
)
@pytest.mark.parametrize("repeats", [1, 1000, MANY_CHARS])
def test_a_text_without_tokens_is_a_bad_request(model: Any, repeats: int) -> None:
    """The library raises plain `Exception` if the vocabulary has no token for unknown text."""
    backend = Backend(model)
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_id=None, origin="x")
    with pytest.raises(InvalidRequest, match="cannot encode the text"):
        tokenizer.encode("b" * repeats, add_special_tokens=False)


def test_a_lone_surrogate_is_found_at_its_place_in_a_long_text() -> None:
    text = "word " * MANY_CHARS
    with pytest.raises(InvalidRequest, match=f"lone surrogate at position {len(text)},"):
        byte_level_tokenizer().encode(text + "\ud83d")


def test_the_space_that_encoding_adds_is_removed_only_at_the_start() -> None:
    tokenizer = sentence_piece_tokenizer()
    ids = tokenizer.encode("ab ab")
    assert tokenizer.decode(ids) == "ab ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> ab ab"
    assert tokenizer.decode(ids[2:]) == "ab"
    assert tokenizer.token_str(ids[1]) == " ab"
    assert (tokenizer.piece(ids[1]), tokenizer.piece(10**6)) == ("▁ab", "")


def test_truncation_and_padding_of_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    backend = _byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert load_tokenizer(_model_files(tmp_path, backend=backend)).encode("xyzxyz") == list(b"xyzxyz")


ABSENT = object()
FLAGS = [ABSENT, None, True, False]


@pytest.mark.parametrize("own", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("add_eos", FLAGS, ids=["absent", "null", "true", "false"])
@pytest.mark.parametrize("add_bos", FLAGS, ids=["absent", "null", "true", "false"])
def test_a_flag_that_is_not_null_changes_its_own_end(
    tmp_path: Path, add_bos: object, add_eos: object, own: tuple[bool, bool]
) -> None:
    config: dict[str, Any] = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}}
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    config |= {name: flag for name, flag in flags.items() if flag is not ABSENT}
    backend = _byte_level_backend(add_bos_token=own[0], add_eos_token=own[1])
    tokenizer = load_tokenizer(_model_files(tmp_path, backend=backend, tokenizer_config=config))
    before, after = (flag if flag in (True, False) else had for flag, had in zip(flags.values(), own, strict=True))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer.encode("z") == [*[bos] * before, ord("z"), *[eos] * after]
    assert tokenizer.encode("") == [*[bos] * before, *[eos] * after]
    assert tokenizer.encode("z", add_special_tokens=False) == [ord("z")]


@pytest.mark.parametrize("for_vector", [False, True])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("own", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_a_cut_without_a_side_keeps_the_special_tokens_around_a_text(
    own: tuple[bool, bool], side: Any, for_vector: bool
) -> None:
    """Expected: the library's own truncation, which cuts the text and then puts the special tokens around it."""
    backend = _byte_level_backend(add_bos_token=own[0], add_eos_token=own[1])
    tokenizer = Tokenizer(Backend.from_str(backend.to_str()), bos_token_id=None, eos_token_id=None, origin="x")
    default = "right" if for_vector else "left"
    for size in range(3, 12):
        whole = tokenizer.encode("xyzabcd")
        cut = tokenizer.truncate(whole, size, side=side, max_model_len=99, is_framed=True, for_vector=for_vector)
        plain = whole[:size] if (side or default) == "right" else whole[-size:]
        backend.enable_truncation(size, direction=default)
        assert cut == (backend.encode("xyzabcd").ids if side is None else plain)
        assert len(cut) == min(size, len(whole))
        unframed = tokenizer.truncate(whole, size, side=side, max_model_len=99, is_framed=False, for_vector=for_vector)
        assert unframed == plain


def test_a_cut_is_limited_by_the_context() -> None:
    backend = _byte_level_backend(add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_id=None, origin="x")
    whole = tokenizer.encode("uvwxyz")
    cut = partial(tokenizer.truncate, whole, side=None, max_model_len=5, is_framed=True)
    assert cut(-1, for_vector=True) == [whole[0], *b"uvw", whole[-1]]
    assert cut(-1, for_vector=False) == [whole[0], *b"yz", whole[-1]]
    assert [cut(size, for_vector=True) for size in (0, 1, 2)] == [[], whole[:1], [whole[0], whole[-1]]]
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens=6 is more than 5") as refused:
        cut(6, for_vector=True)
    assert refused.value.param == "truncate_prompt_tokens"


def test_several_tokens_at_an_end_stay_if_the_other_end_changes(tmp_path: Path) -> None:
    backend = _byte_level_backend()
    start, end = (backend.token_to_id(name) for name in ("<|start|>", "<|end|>"))
    put_around(backend, [end, start], [])
    config = {"eos_token": "<|end|>", "add_eos_token": True, "bos_token": "<not there>", "add_bos_token": True}
    tokenizer = load_tokenizer(_model_files(tmp_path, backend=backend, tokenizer_config=config))
    assert tokenizer.encode("z") == [end, start, ord("z"), end]


def test_roles_default_to_those_of_the_model_config(tmp_path: Path) -> None:
    files = _model_files(
        tmp_path, backend=_byte_level_backend(), config={"bos_token_id": 264, "eos_token_id": [265, 3]}
    )
    tokenizer = load_tokenizer(files)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (264, 265)
    broken = _model_files(tmp_path, backend=_byte_level_backend(), config={"bos_token_id": None, "eos_token_id": 10**6})
    assert load_tokenizer(broken).eos_token_id is None


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    size = _byte_level_backend().get_vocab_size()
    listed = {
        str(size): {"content": "<think>", "special": False},
        str(size + 1): {"content": "<hidden>", "special": True},
        str(size + 9): {"content": "<beyond a gap>", "special": True},
        "97": {"content": "a", "special": False},
    }
    config = {"added_tokens_decoder": listed}
    tokenizer = load_tokenizer(_model_files(tmp_path, backend=_byte_level_backend(), tokenizer_config=config))
    assert tokenizer.encode("<think>a<hidden>") == [size, 97, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<think>"
    assert tokenizer.token_id("<beyond a gap>") is None


def test_a_gguf_files_tokenizer_is_loaded(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata(add_eos_token=True))
    tokenizer = load_tokenizer(_model_files(tmp_path, gguf=path))
    assert tokenizer.decode(tokenizer.encode("ab\n"), skip_special_tokens=False) == "ab\n<|end|>"


def test_vocab_json_and_merges_txt_are_loaded(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *metadata["tokenizer.ggml.merges"], ""])
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    config = {"bos_token": {"content": "<|end|>"}, "eos_token": {"content": "<|end|>"}, "add_bos_token": True}
    tokenizer = load_tokenizer(_model_files(tmp_path, tokenizer_config=config | {"pad_token": "<|start|>"}))
    expected = byte_level_tokenizer().encode("ab 12 ab", add_special_tokens=False)
    assert tokenizer.encode("ab 12 ab") == [vocab["<|end|>"], *expected]
    assert tokenizer.special_ids == {vocab["<|end|>"], vocab["<|start|>"]}
    (tmp_path / "merges.txt").write_text("x yz\n")
    with pytest.raises(StartupError, match="tokenizer cannot be loaded"):
        load_tokenizer(_model_files(tmp_path))


def test_a_model_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json, GGUF file.*--tokenizer"):
        load_tokenizer(_model_files(tmp_path))


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0"}', "[1]"])
def test_a_corrupt_tokenizer_json_gives_a_one_line_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json: the tokenizer cannot be loaded") as caught:
        load_tokenizer(_model_files(tmp_path, tokenizer_json=path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder()])
def test_other_decoders_are_refused(tmp_path: Path, decoder: Any) -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(StartupError, match=r"decoder .* is not supported"):
        load_tokenizer(_model_files(tmp_path, backend=backend))


@pytest.mark.parametrize(("scheme", "strips"), [("always", True), ("first", True), ("never", False)])
def test_metaspace_decoders_are_supported(tmp_path: Path, scheme: str, strips: bool) -> None:
    backend = Backend(models.BPE({"▁a": 0, "b": 1, "<0x0A>": 2}, []))
    backend.decoder = decoders.Metaspace("▁", scheme)
    tokenizer = load_tokenizer(_model_files(tmp_path, backend=backend))
    assert tokenizer.decode([0, 1, 0]) == ("ab a" if strips else " ab a")
