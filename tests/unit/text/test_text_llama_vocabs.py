"""Every vocabulary of llama.cpp's own tests, against its expected ids.

They are in the source distribution and are not committed. To fetch them once:
`pip download --no-deps --no-binary :all: llama-cpp-python`, then unpack `vendor/llama.cpp/models/ggml-vocab-*` of it
into the folder that OCTAVO_LLAMA_VOCABS names.
"""

import os
from pathlib import Path

import pytest
from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.text.gguf_tokenizer import build_gguf_backend, read_vocab
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.errors import StartupError

FOLDER = Path(os.environ.get("OCTAVO_LLAMA_VOCABS", "/nonexistent"))
VOCABS = [path for path in sorted(FOLDER.glob("ggml-vocab-*.gguf")) if path.with_suffix(".gguf.out").exists()]
UNSUPPORTED = ("bert", "gemma4")

pytestmark = pytest.mark.skipif(not VOCABS, reason="OCTAVO_LLAMA_VOCABS names no folder with llama.cpp's vocabularies")


@pytest.mark.parametrize("path", VOCABS, ids=[path.stem for path in VOCABS])
def test_ids_equal_llama_cpp(path: Path) -> None:
    vocab = read_vocab(read_gguf(path).metadata, path)
    if vocab.values["model"] in UNSUPPORTED:
        with pytest.raises(StartupError, match="is not supported"):
            build_gguf_backend(vocab)
        return
    tokenizer = Tokenizer(build_gguf_backend(vocab), bos_token_id=None, eos_token_id=None, origin=str(path))
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in path.with_suffix(".gguf.out").read_text().splitlines()]
    assert len(expected) >= 40
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
