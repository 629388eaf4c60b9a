"""Builds tokenizers ("backends") of the `tokenizers` library.

Only this module catches the library's errors, which are plain `Exception`s.
"""

from collections.abc import Callable

from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from octavo_engine.text.pre_tokenizers import PreTokenizer
from octavo_engine.wire.errors import InvalidRequest, StartupError

#: If texts have at most this many characters in all, encoding them without threads is faster.
FEW_CHARS = 128


def load_backend(origin: str, make: Callable[[], Backend]) -> Backend:
    """Build a backend. Raises StartupError, which names the file, for every error of the library."""
    try:
        return make()
    except Exception as error:
        raise StartupError(f"{origin}: the tokenizer cannot be loaded: {error}") from error


def byte_level_backend(ids: dict[str, int], merges: list[tuple[str, str]], kind: PreTokenizer) -> Backend:
    """Build a byte-level BPE. `ids` and `merges` are in GPT-2's byte alphabet; merges are in order of rank."""
    backend = Backend(models.BPE(ids, merges, ignore_merges=kind.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def encode_texts(backend: Backend, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Encode texts. Every error of the library, such as text without a token, raises InvalidRequest."""
    try:
        if sum(map(len, texts)) <= FEW_CHARS:
            return [backend.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]
    except Exception as error:
        raise InvalidRequest(f"The tokenizer cannot encode the text: {error}.", param="prompt") from error


def tokens_around(backend: Backend) -> tuple[list[int], list[int]]:
    """Return the tokens that `encode` puts before and after a text if special tokens are requested.

    The text is an added token if there is one: a model without a token for unknown text cannot encode all others.
    """
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    encoded = backend.encode(next(iter(added), "a"))
    of_text = [i for i, sequence in enumerate(encoded.sequence_ids) if sequence is not None] or [len(encoded.ids)]
    return encoded.ids[: of_text[0]], encoded.ids[of_text[-1] + 1 :]


def put_around(backend: Backend, before: list[int], after: list[int]) -> None:
    """Make `encode` put these tokens before and after a text if special tokens are requested."""
    names = {i: backend.id_to_token(i) for i in (*before, *after)}
    template = [*(names[i] for i in before), "$A", *(names[i] for i in after)]
    special = [(name, i) for i, name in names.items()]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
