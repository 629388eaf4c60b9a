"""Builds tokenizers ("backends") of the `tokenizers` library.

Only this module catches the library's errors, which are plain `Exception`s.
"""

from collections.abc import Callable

from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from octavo_engine.text.pre_tokenizers import PreTokenizer
from octavo_engine.wire.errors import StartupError


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


def add_bos_eos(backend: Backend, bos_id: int | None, eos_id: int | None) -> None:
    """Make `encode` put these tokens around a text (None: no token) if special tokens are requested."""
    before, after = ([(backend.id_to_token(i), i)] if i is not None else [] for i in (bos_id, eos_id))
    template = [*(name for name, _ in before), "$A", *(name for name, _ in after)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*before, *after])
