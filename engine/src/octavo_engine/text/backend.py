"""The parts that our tokenizers are put together from, on the `tokenizers` library (the "backend").

The only place that knows that this library's errors are plain `Exception`s.
"""

from collections.abc import Callable

from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from octavo_engine.text.pre_tokenizers import PreTokenizer
from octavo_engine.wire.errors import StartupError


def load_backend(origin: str, make: Callable[[], Backend]) -> Backend:
    """Raises StartupError, naming the file, for whatever the library finds wrong."""
    try:
        return make()
    except Exception as error:
        raise StartupError(f"{origin}: holds no usable tokenizer: {error}") from error


def byte_level_backend(ids: dict[str, int], merges: list[tuple[str, str]], kind: PreTokenizer) -> Backend:
    """`ids` and `merges` in GPT-2's byte alphabet; merges in order of rank."""
    backend = Backend(models.BPE(ids, merges, ignore_merges=kind.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def add_bos_eos(backend: Backend, bos_id: int | None, eos_id: int | None) -> None:
    """Makes `encode` put these around a text (None: nothing) where special tokens are asked for."""
    before, after = ([(backend.id_to_token(i), i)] if i is not None else [] for i in (bos_id, eos_id))
    template = [*(name for name, _ in before), "$A", *(name for name, _ in after)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*before, *after])
