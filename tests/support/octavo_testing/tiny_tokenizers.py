"""Tokenizers small enough to read, as the key-values of a GGUF header: byte-level BPE and SentencePiece.

Both have a token for every byte, so that any text can be encoded and is the decoding of some ids.
"""

import struct
from pathlib import Path
from typing import Any

from octavo_engine.text.gguf_tokenizer import TokenType, build_gguf_backend, read_vocab
from octavo_engine.text.token_bytes import from_byte_level
from octavo_engine.text.tokenizer import Tokenizer

CONTROL = ("<|start|>", "<|end|>")
USER_DEFINED = ("<tool>",)


def _is_byte_char(char: str) -> bool:
    return len(from_byte_level(char)) == 1 and char != "\x7f"


#: One character for each byte, in order of the bytes.
_BYTE_CHARS = sorted((chr(c) for c in range(0x21, 0x144) if _is_byte_char(chr(c))), key=from_byte_level)
_PIECES = ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "é", "日", "▁▁", "\n")


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """Ids: the 256 bytes in order, merged words, control tokens, user-defined tokens. `changes` override short keys."""
    merges = ["Ġ a", "Ġ b", "a b", "Ġ ab", "Ġ Ġ", "1 2", "Ċ Ċ", "Ã ©"]
    tokens = [*_BYTE_CHARS, *(merge.replace(" ", "") for merge in merges), *CONTROL, *USER_DEFINED]
    types = [TokenType.NORMAL] * (len(tokens) - 3) + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    start = tokens.index(CONTROL[0])
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": merges,
        "bos_token_id": start,
        "eos_token_id": start + 1,
    }
    return _prefixed(values | changes)


def sentence_piece_metadata(**changes: Any) -> dict[str, Any]:
    """Ids: unknown, start, end, the 256 bytes, pieces; earlier pieces merge first."""
    specials = ["<unk>", "<s>", "</s>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, *USER_DEFINED]
    kinds = (
        [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
        + [TokenType.BYTE] * 256
        + [TokenType.NORMAL] * len(_PIECES)
        + [TokenType.USER_DEFINED]
    )
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": [int(kind) for kind in kinds],
        "scores": [0.0 if i < 259 else float(259 - i) for i in range(len(tokens))],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _prefixed(values | changes)


def make_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    vocab = read_vocab(metadata, Path("tiny.gguf"))
    backend = build_gguf_backend(vocab)
    return Tokenizer(backend, bos_token_id=vocab.id_of("bos"), eos_token_id=vocab.id_of("eos"), origin="tiny.gguf")


def byte_level_tokenizer(**changes: Any) -> Tokenizer:
    return make_tokenizer(byte_level_metadata(**changes))


def sentence_piece_tokenizer(**changes: Any) -> Tokenizer:
    return make_tokenizer(sentence_piece_metadata(**changes))


def _prefixed(values: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file with these key-values and no tensors."""
    entries = b"".join(_string(key) + _typed(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + entries)
    return path


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind, items = _kind_and_items(value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    kind, items = _kind_and_items([value])
    return struct.pack("<I", kind) + items


def _kind_and_items(values: list[Any]) -> tuple[int, bytes]:
    if isinstance(values[0], str):
        return 8, b"".join(map(_string, values))
    if isinstance(values[0], bool):
        return 7, struct.pack(f"<{len(values)}?", *values)
    if isinstance(values[0], int):
        return 5, struct.pack(f"<{len(values)}i", *values)
    return 6, struct.pack(f"<{len(values)}f", *values)
