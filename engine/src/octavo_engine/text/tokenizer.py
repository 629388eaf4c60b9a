"""`Tokenizer`: converts text to token ids and back with the `tokenizers` library, without transformers and torch.

The library encodes. This module decodes: it joins the tokens' bytes and reads them as UTF-8, so that a stream of tokens
gives exactly the same text as the whole. Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid sequence.
`load_tokenizer` reads `tokenizer.json`, a GGUF header, or `vocab.json` with `merges.txt`.
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.sources.json_file import read_json_object
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.text.backend import byte_level_backend, encode_texts, load_backend, put_around, tokens_around
from octavo_engine.text.gguf_tokenizer import build_gguf_backend, read_vocab
from octavo_engine.text.pre_tokenizers import PRE_TOKENIZERS
from octavo_engine.text.split_points import SafeSplitter
from octavo_engine.text.token_bytes import alphabet_of
from octavo_engine.wire.errors import InvalidRequest, StartupError

#: Longer texts are encoded in pieces, as the library holds some 150 bytes a character until the whole text is done.
MANY_CHARS = 64 * 1024
#: Pieces of a long text in one call of the library, about `LONG_CHARS` characters each.
PIECES_AT_ONCE = 64


class Tokenizer:
    """A thread-safe tokenizer: its caches of tokens are filled on use, always with the same values.

    `special_ids`: tokens without text, which are omitted if special tokens are skipped.
    """

    def __init__(self, backend: Backend, *, bos_token_id: int | None, eos_token_id: int | None, origin: str) -> None:
        added = backend.get_added_tokens_decoder()
        named = {token_id for token_id in (bos_token_id, eos_token_id) if token_id is not None}
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.vocab_size = max(ids, default=-1) + 1
        self.special_ids = frozenset(named.union(i for i, token in added.items() if token.special))
        self._backend = backend
        self._added = frozenset(added)
        self._alphabet = alphabet_of(backend, origin)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._texts: list[str | None] = [None] * self.vocab_size

    @classmethod
    def from_json(cls, text: str, *, bos_token_id: int | None, eos_token_id: int | None) -> "Tokenizer":
        """Create an equal tokenizer from the result of `to_json`. Raises StartupError."""
        backend = load_backend("tokenizer", lambda: Backend.from_str(text))
        return cls(backend, bos_token_id=bos_token_id, eos_token_id=eos_token_id, origin="tokenizer")

    def to_json(self) -> str:
        text: str = self._backend.to_str()
        return text

    @property
    def strips_space(self) -> bool:
        """True if decoding removes the leading space that encoding adds to a text (SentencePiece)."""
        return self._alphabet.strips_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text without the GIL. The text of special tokens (`<|im_end|>`) becomes those tokens."""
        if len(text) > MANY_CHARS:
            return self._encode_long(text, add_special_tokens=add_special_tokens)
        return self.encode_each([text], add_special_tokens=add_special_tokens)[0]

    def encode_each(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            _check_encodable(text)
        return encode_texts(self._backend, texts, add_special_tokens=add_special_tokens)

    def truncate(
        self,
        token_ids: list[int],
        size: int,
        *,
        side: Literal["left", "right"] | None,
        max_model_len: int,
        is_framed: bool,
        for_vector: bool = False,
    ) -> list[int]:
        """Truncate a prompt to `size` tokens; -1: to the context length, minus one output token unless `for_vector`.

        `side`: "left" keeps the last tokens; "right" the first ones; None: "right" if `for_vector`, else "left". With
        None, special tokens that `encode` has added around a text are kept (`is_framed`). Raises InvalidRequest.
        """
        if size > max_model_len:
            message = f"truncate_prompt_tokens={size} is more than {max_model_len}, the context length: send less."
            raise InvalidRequest(message, param="truncate_prompt_tokens")
        if size == -1:
            size = max_model_len if for_vector else max_model_len - 1
        if size >= len(token_ids):
            return token_ids
        before, after = (self.special_frame if is_framed and side is None else None) or ([], [])
        room = size - len(before) - len(after)
        if room < 0:
            return token_ids[:size]
        text = token_ids[len(before) : len(token_ids) - len(after)]
        keeps_first = side == "right" or (side is None and for_vector)
        return [*before, *(text[:room] if keeps_first else text[len(text) - room :]), *after]

    @cached_property
    def special_frame(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after each text; None if adding special tokens changes other tokens, too."""
        frames = [
            _split_around(self.encode(text), self.encode(text, add_special_tokens=False)) for text in ("a", "b c")
        ]
        return frames[0] if frames[0] == frames[1] else None

    def _encode_long(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode in pieces where the text can be cut safely, with one object for all occurrences of an id."""
        _check_encodable(text)  # the check of a piece would name a place in the piece
        frame = self.special_frame if add_special_tokens else ([], [])
        if frame is None:
            return self.encode_each([text])[0]
        pieces = self._splitter.split(text)
        objects: dict[int, int] = {}
        ids = list(frame[0])
        for start in range(0, len(pieces), PIECES_AT_ONCE):
            for piece in self.encode_each(pieces[start : start + PIECES_AT_ONCE], add_special_tokens=False):
                ids += [objects.setdefault(token_id, token_id) for token_id in piece]
        return ids + frame[1]

    @cached_property
    def _splitter(self) -> SafeSplitter:
        return SafeSplitter.from_tokenizer(self.to_json(), near="")

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        data = b"".join(self.visible_bytes(ids, skip_special_tokens=skip_special_tokens))
        return (data.removeprefix(b" ") if self.strips_space else data).decode(errors="replace")

    def visible_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool) -> list[bytes]:
        hidden = self.special_ids if skip_special_tokens else ()
        return [self.token_bytes(token_id) for token_id in ids if token_id not in hidden]

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for an id without a token, as a head may be wider than the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        spelled = self._bytes[token_id]
        if spelled is None:
            spelled = self._bytes[token_id] = self._spell(token_id)
        return spelled

    def token_str(self, token_id: int) -> str:
        """Return a single token's text; incomplete characters become U+FFFD."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        text = self._texts[token_id]
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode(errors="replace")
        return text

    def piece(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, e.g. `Ġworld`; empty for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, e.g. `<|im_end|>`; None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def special_id(self, token: str) -> int | None:
        """Return the id of a special token; None if the token is not special, or not in the vocabulary."""
        token_id = self.token_id(token)
        return token_id if token_id in self.special_ids else None

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        spell = self._alphabet.added_token_bytes if token_id in self._added else self._alphabet.token_bytes
        return spell(token)


def _split_around(whole: list[int], inner: list[int]) -> tuple[list[int], list[int]] | None:
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return None


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"a lone surrogate at position {error.start}"
        raise InvalidRequest(f"The text holds {where}, which UTF-8 cannot encode.", param="prompt") from error


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load a model's tokenizer. Raises StartupError, which names the file."""
    if files.tokenizer_json is not None:
        return _from_tokenizer_json(files.tokenizer_json, files)
    if files.gguf is not None:
        return _from_gguf(files.gguf)
    if (files.root / "vocab.json").is_file() and (files.root / "merges.txt").is_file():
        return _from_vocab_and_merges(files)
    raise StartupError(
        f"{files.root}: there is no tokenizer.json, GGUF file, or vocab.json with merges.txt: "
        "pass --tokenizer with a model that has one."
    )


def _from_gguf(path: Path) -> Tokenizer:
    vocab = read_vocab(read_gguf(path).metadata, path)
    backend = build_gguf_backend(vocab)
    return Tokenizer(backend, bos_token_id=vocab.id_of("bos"), eos_token_id=vocab.id_of("eos"), origin=str(path))


def _from_tokenizer_json(path: Path, files: ModelFiles) -> Tokenizer:
    backend = load_backend(str(path), lambda: Backend.from_file(str(path)))
    backend.no_truncation()
    backend.no_padding()
    return _configured(backend, files, str(path))


def _from_vocab_and_merges(files: ModelFiles) -> Tokenizer:
    """Load the oldest format, that of GPT-2 and OPT."""
    vocab = read_json_object(files.root / "vocab.json")
    lines = (files.root / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
    backend = load_backend(str(files.root), lambda: byte_level_backend(vocab, merges, PRE_TOKENIZERS["gpt-2"]))
    return _configured(backend, files, str(files.root))


def _pair(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _configured(backend: Backend, files: ModelFiles, origin: str) -> Tokenizer:
    """Apply the settings of `tokenizer_config.json` to a backend, as transformers does."""
    config = files.tokenizer_config
    bos, eos = (_named_id(backend, files, role) for role in ("bos", "eos"))
    _mark_special(backend, config, bos, eos)
    _add_missing_tokens(backend, config)
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if add_bos is not None or add_eos is not None:
        before, after = tokens_around(backend)
        put_around(backend, _end(before, add_bos, bos), _end(after, add_eos, eos))
    return Tokenizer(backend, bos_token_id=bos, eos_token_id=eos, origin=origin)


def _end(own: list[int], flag: Any, token_id: int | None) -> list[int]:
    """Return the tokens at one end of a text. A flag that is absent or null, or names no token, changes nothing."""
    if flag is None or (flag and token_id is None):
        return own
    return [token_id] if flag and token_id is not None else []


def _named_id(backend: Backend, files: ModelFiles, role: str) -> int | None:
    token = token_content(files.tokenizer_config.get(f"{role}_token"))
    token_id: int | None = None if token is None else backend.token_to_id(token)
    if token_id is not None:
        return token_id
    ids = files.config.get(f"{role}_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    return first if isinstance(first, int) and backend.id_to_token(first) is not None else None


def token_content(entry: Any) -> str | None:
    """Return the text of a token in `tokenizer_config.json`, which is a string or an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _mark_special(backend: Backend, config: dict[str, Any], *ids: int | None) -> None:
    """Mark named tokens of the vocabulary as special, which the oldest checkpoints do not do."""
    roles = ("unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
    named = [token_content(config.get(role)) for role in roles]
    named += [backend.id_to_token(token_id) for token_id in ids if token_id is not None]
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = {token for token in named if token and token not in added and backend.token_to_id(token) is not None}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(missing)])


def _add_missing_tokens(backend: Backend, config: dict[str, Any]) -> None:
    """Add tokens that only `tokenizer_config.json` lists, up to a gap in the ids: the library numbers them in order."""
    listed = config.get("added_tokens_decoder")
    entries = sorted((int(i), entry) for i, entry in listed.items()) if isinstance(listed, dict) else []
    for token_id, entry in entries:
        if backend.id_to_token(token_id) is None and token_id == backend.get_vocab_size():
            flags = {
                name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            backend.add_tokens([AddedToken(entry["content"], **flags)])
