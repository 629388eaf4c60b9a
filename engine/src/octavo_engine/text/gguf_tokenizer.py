"""Builds a tokenizer from the `tokenizer.ggml.*` key-values of a GGUF header.

Two models are supported, by llama.cpp's names: `gpt2`, byte-level BPE with ranked merges and a named pre-tokenizer, and
`llama`, SentencePiece's BPE, which always merges the pair that gives the token with the highest score. The second is
converted to ranked merges: every split of a token into two tokens is a merge, ranked by the token's score.
Other models raise an error: with a wrong tokenizer a model still answers, but worse.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from octavo_engine.text.backend import byte_level_backend, load_backend, put_around
from octavo_engine.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_WORD_START = "▁"


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """The key-values under `tokenizer.ggml.`, without that prefix, checked for consistency."""

    path: Path
    values: dict[str, Any]
    tokens: list[str]
    types: list[int]
    model_name: str

    @property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def id_of(self, role: str) -> int | None:
        """Return the id of the token with a role (bos, eos, unknown, ...); None if the file has no valid id."""
        token_id = self.values.get(f"{role}_token_id")
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.values.get(name, default))


def read_vocab(metadata: dict[str, Any], path: Path) -> GGUFVocab:
    values = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    tokens = values.get("tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise StartupError(f"{path}: has no {_PREFIX}tokens, so it contains no tokenizer: pass --tokenizer.")
    types = values.get("token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise StartupError(f"{path}: has {len(tokens)} tokens but {len(types)} token types.")
    return GGUFVocab(path, values, tokens, types, str(metadata.get("general.name", "")))


def build_gguf_backend(vocab: GGUFVocab) -> Backend:
    model = vocab.values.get("model")
    if model == "gpt2":
        backend, add_bos = _byte_level(vocab)
    elif model == "llama":
        backend, add_bos = _sentence_piece(vocab), True
    else:
        raise StartupError(f"{vocab.path}: tokenizer model {model!r} is not supported, only 'gpt2' and 'llama'.")
    _add_tokens(backend, vocab)
    _add_vocab_bos_eos(backend, vocab, add_bos)
    return backend


def _byte_level(vocab: GGUFVocab) -> tuple[Backend, bool]:
    kind = _pre_tokenizer(vocab)
    merges = [_merge(vocab, line) for line in vocab.values.get("merges") or ()]
    return load_backend(str(vocab.path), lambda: byte_level_backend(vocab.ids, merges, kind)), kind.add_bos


def _pre_tokenizer(vocab: GGUFVocab) -> PreTokenizer:
    name = vocab.values.get("pre")
    if name is None:
        logger.warning(
            "%s: the file names no pre-tokenizer; 'default' is used. Answers may be worse: convert the model again.",
            vocab.path,
        )
        name = "default"
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise StartupError(f"{vocab.path}: unknown pre-tokenizer {_PREFIX}pre={name!r}; supported are: {known}.")
    return kind


def _merge(vocab: GGUFVocab, line: str) -> tuple[str, str]:
    """Split a merge "LEFT RIGHT" at a space, but not at its first character, as a token may start with a space."""
    split = line.find(" ", 1)
    if split < 0:
        raise StartupError(f"{vocab.path}: {_PREFIX}merges has the entry {line!r}, which is not a pair.")
    return line[:split], line[split + 1 :]


def _sentence_piece(vocab: GGUFVocab) -> Backend:
    scores = vocab.values.get("scores") or []
    if len(scores) != len(vocab.tokens):
        raise StartupError(f"{vocab.path}: has {len(vocab.tokens)} tokens but {len(scores)} scores.")
    unknown = vocab.id_of("unknown")
    model = models.BPE(
        vocab.ids,
        list(_score_merges(vocab, scores)),
        unk_token=None if unknown is None else vocab.tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in vocab.types,
    )
    backend = Backend(model)
    starts_with_space = vocab.flag("add_space_prefix", True)
    space = normalizers.Replace(" ", _WORD_START)
    prefix = [normalizers.Prepend(_WORD_START)] if starts_with_space else []
    backend.normalizer = normalizers.Sequence([*prefix, space])
    strip = [decoders.Strip(" ", 1, 0)] if starts_with_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _score_merges(vocab: GGUFVocab, scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield every split of every normal token into two tokens: best score first, then shorter left halves first."""
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    ids = vocab.ids
    by_score = sorted(range(len(vocab.tokens)), key=lambda i: -scores[i])
    for token_id in by_score:
        token = vocab.tokens[token_id]
        if vocab.types[token_id] not in mergeable:
            continue
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in ids and right in ids:
                yield left, right


def _add_tokens(backend: Backend, vocab: GGUFVocab) -> None:
    """Add control tokens as special tokens, which are skipped, and user-defined tokens as text that is never split."""
    always = {vocab.id_of(role) for role in ("bos", "eos", "eot", "eom", "unknown")}
    strip_right = _strips_right(vocab)
    special, plain = [], []
    for token_id, (token, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True)):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in always:
            rstrip = strip_right and token not in ("<unk>", "<s>", "<|endoftext|>")
            special.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False, rstrip=strip_right))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _strips_right(vocab: GGUFVocab) -> bool:
    """Return True for Phi-3, whose special tokens absorb following whitespace; llama.cpp also decides by the name."""
    name = vocab.model_name.lower()
    return "phi-3" in name or "phi3" in name


def _add_vocab_bos_eos(backend: Backend, vocab: GGUFVocab, add_bos: bool) -> None:
    bos, eos = vocab.id_of("bos"), vocab.id_of("eos")
    before = [bos] if bos is not None and vocab.flag("add_bos_token", add_bos) else []
    after = [eos] if eos is not None and vocab.flag("add_eos_token", False) else []
    put_around(backend, before, after)
