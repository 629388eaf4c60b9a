"""The bytes of each token. Decoding joins these bytes, which makes decoding of streams cheap and exact.

Two alphabets cover all supported models: byte-level BPE writes each byte as one printable character (GPT-2's table),
SentencePiece writes text with "▁" for a space, and "<0xE2>" for a byte that no token has as text. A tokenizer's decoder
determines its alphabet; another decoder raises an error, since joining bytes would be wrong.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from octavo_engine.wire.errors import StartupError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"


def _byte_alphabet() -> dict[str, int]:
    """Build GPT-2's table: printable Latin-1 characters represent themselves, U+0100 onwards the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def from_byte_level(token: str) -> bytes:
    """Decode a token; if a character is not in the alphabet, the token is plain text (an added token)."""
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()


def from_sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes((int(byte[1], 16),)) if byte else token.replace(_WORD_START, " ").encode()


@dataclass(frozen=True, slots=True)
class Alphabet:
    """A way of spelling bytes. `strips_space`: decoding removes one leading space from a text's first token."""

    token_bytes: Callable[[str], bytes]
    added_token_bytes: Callable[[str], bytes]
    strips_space: bool = False


def alphabet_of(backend: Backend, origin: str) -> Alphabet:
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Alphabet(from_byte_level, str.encode)
    if any(map(_replaces_word_start, steps)):
        return Alphabet(from_sentence_piece, from_sentence_piece, any(map(_strips_space, steps)))
    names = " and ".join(sorted(kinds)) or "none"
    raise StartupError(f"{origin}: tokenizer decoder {names} is not supported, only byte-level and SentencePiece ones.")


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _replaces_word_start(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == _WORD_START)
    return step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": _WORD_START}, " ")


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return step["type"] == "Strip" and (step["content"], step["start"] > 0) == (" ", True)
