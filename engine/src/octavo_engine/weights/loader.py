"""`iter_weights`: yields a checkpoint's tensors one at a time with Hugging Face parameter names, for every format.

Peak memory is the consumer's tensors plus one tensor. Read errors are StartupErrors with file and tensor; `Model`
reports missing, unexpected or wrongly shaped tensors, as it has the list of required tensors.
"""

import pickle
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, overload
from zipfile import is_zipfile

import torch
from torch import Tensor
from tqdm import tqdm

from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor
from octavo_engine.ops.native_quantised import QuantisedTensor
from octavo_engine.sources.gguf_header import GGMLType
from octavo_engine.sources.model_config import nested_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.weight_choice import read_weight_map
from octavo_engine.weights.gguf_file import gguf_tensors, iter_gguf
from octavo_engine.weights.gguf_tensors import GROUP_FORMATS
from octavo_engine.weights.quantised_layers import (
    QuantisedLayer,
    iter_quantised,
    log_settings,
    quantised_layers,
)
from octavo_engine.weights.safetensors_file import LazyTensor, iter_safetensors, lazy_safetensors
from octavo_engine.wire.errors import StartupError

#: A function of (bytes done, total bytes).
Progress = Callable[[int, int], None]

#: Multimodal checkpoints: the prefix of the text part -> the prefix in the text-only model.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
    **{prefix: prefix for prefix in ("model.embed_tokens.", "model.layers.", "model.norm.")},
}

#: vLLM's names for KV cache scales, for K, for V, or for both, with the number of the layer.
_CACHE_SCALE = re.compile(r"\b(\d+)\.\w+\.(?:(?:\w+\.)?(kv|k|v)_scale|([kv])_proj\.output_scale)$")


@overload
def iter_weights(
    files: ModelFiles,
    *,
    dtype: torch.dtype | None = None,
    skipped: Container[str] = (),
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor]]: ...


@overload
def iter_weights(
    files: ModelFiles,
    *,
    dtype: torch.dtype | None = None,
    blocks: Container[str],
    groups: Container[str] = (),
    skipped: Container[str] = (),
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor | QuantisedTensor | GroupTensor]]: ...


def iter_weights(
    files: ModelFiles,
    *,
    dtype: torch.dtype | None = None,
    blocks: Container[str] = (),
    groups: Container[str] = (),
    skipped: Container[str] = (),
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor | QuantisedTensor | GroupTensor]]:
    """Yield (name, tensor). `dtype`: dtype of GGUF's and of expanded tensors (default: float32, if they are quantised);
    other tensors keep their dtype. `blocks`, `groups`: names of quantised tensors to yield as `QuantisedTensor` and as
    `GroupTensor`. `skipped`: names of modules to omit.

    A yielded tensor may be kept, but not changed in place (it can be a mapped file). Raises StartupError.
    """
    try:
        advance = _advance(files, progress)
        if files.load_format == "gguf":
            yield from iter_gguf(files, dtype=dtype, blocks=blocks, groups=groups, skipped=skipped, advance=advance)
        else:
            layers, tensors = read_quantised_layers(files), _iter_hugging_face(files, advance, skipped)
            yield from iter_quantised(layers, tensors, dtype=dtype, blocks=blocks, groups=groups) if layers else tensors
    except OSError as error:
        raise StartupError(f"{error.filename or files.root}: cannot be read: {error.strerror or error}") from error


def tower_weights(files: ModelFiles) -> dict[str, Any]:
    """Return the tensors of a multimodal checkpoint outside its text part; `[...]` reads one of a safetensors file."""
    if files.load_format == "safetensors":
        pairs: Iterable[tuple[str, Any]] = (
            pair for path in files.weight_files for pair in lazy_safetensors(path, advance=lambda _: None)
        )
    else:
        pairs = (pair for path in files.weight_files for pair in _iter_torch_file(path, advance=lambda _: None))
    return {name: tensor for name, tensor in pairs if _text_name(name) is None}


def read_quantised_layers(files: ModelFiles, *, log: bool = False) -> dict[str, QuantisedLayer]:
    """Return the quantised layers by the names of their weights; {} for an unquantised checkpoint."""
    if files.quantisation is None:
        return {}
    tensors = _text_tensors(files)
    if log:
        log_settings(files.quantisation, tensors)
    headers = {name: tensor.info for name, tensor in tensors.items()}
    return quantised_layers(files.quantisation, headers, lambda name: tensors[name][...])


def read_cache_scales(files: ModelFiles) -> dict[int, tuple[float, float]]:
    """Return each layer's scales of K and V for an FP8 cache; {} for an unquantised checkpoint. Raises StartupError."""
    found: dict[int, dict[str, float]] = {}
    for name, tensor in {} if files.quantisation is None else _text_tensors(files).items():
        match = _CACHE_SCALE.search(name)
        if match is not None:
            found.setdefault(int(match[1]), {})[match[2] or match[3]] = _read_scale(name, tensor[...])
    both = {layer: scales.get("kv", max(scales.values())) for layer, scales in found.items()}  # as in vLLM
    return {layer: (scales.get("k", both[layer]), scales.get("v", both[layer])) for layer, scales in found.items()}


def _read_scale(name: str, tensor: Tensor) -> float:
    values = tensor.float().flatten().tolist()
    if len(values) == 1 and torch.finfo(torch.float32).tiny <= values[0] < float("inf"):
        return float(values[0])
    what = f"is {values[0]}" if len(values) == 1 else f"has {len(values)} values"
    raise StartupError(
        f"tensor '{name}' {what}, but the scale of a KV cache is one positive number: leave out --kv-cache-dtype, or "
        "use another checkpoint."
    )


def _text_tensors(files: ModelFiles) -> dict[str, LazyTensor]:
    """Return the tensors of safetensors files by their names in the text-only model."""
    is_nested = isinstance(nested_config(files.config).get("text_config"), dict)
    return {
        text_name: tensor
        for path in files.weight_files
        for name, tensor in lazy_safetensors(path, advance=lambda _: None)
        if (text_name := _text_name(name) if is_nested else name) is not None
    }


def _iter_hugging_face(
    files: ModelFiles, advance: Callable[[int], None], skipped: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    read = iter_safetensors if files.load_format == "safetensors" else _iter_torch_file
    expected = _index(files)
    is_nested = isinstance(nested_config(files.config).get("text_config"), dict)

    def is_wanted(name: str) -> bool:
        missing.discard(name)
        text_name = _text_name(name) if is_nested else name
        return text_name is not None and _module(text_name) not in skipped

    for path in files.weight_files:
        missing = expected.get(path.name, set())
        for name, tensor in read(path, advance=advance, is_wanted=is_wanted):
            text_name = _text_name(name) if is_nested else name
            if text_name is not None:
                yield text_name, tensor
            del tensor  # before the next one is read
        if missing:
            raise StartupError(f"{path}: tensor {min(missing)!r} is missing, although the index lists it in this file.")


def _advance(files: ModelFiles, progress: Progress | None) -> Callable[[int], None]:
    total = sum(path.stat().st_size for path in files.weight_files)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        if progress is not None:
            progress(done, total)

    return advance


def _index(files: ModelFiles) -> dict[str, set[str]]:
    """Return the checkpoint's index: file name -> names of its tensors. It is empty without an index file."""
    suffix = "model.safetensors" if files.load_format == "safetensors" else "pytorch_model.bin"
    index = files.root / f"{suffix}.index.json"
    promised: dict[str, set[str]] = {}
    if index.is_file() and len(files.weight_files) > 1:
        for name, file in read_weight_map(index).items():
            promised.setdefault(file, set()).add(name)
    return promised


def _module(name: str) -> str:
    """Return the name of the module to which a tensor, or a part of a quantised weight, belongs."""
    module, found, _ = name.partition(".weight.")
    return module if found else name.rpartition(".")[0]


def _text_name(name: str) -> str | None:
    """Return a tensor's name in the text-only model; None for tensors of other modalities."""
    for prefix, text_prefix in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return None


@contextmanager
def loading_bar(*, always: bool = False) -> Iterator[Progress]:
    """Show a progress bar "Loading weights" in bytes on stderr; yield the function for `iter_weights(progress=...)`.

    The bar is shown on a terminal, or with `always` also in a log.
    """
    hidden = not (always or sys.stderr.isatty())
    with tqdm(desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=hidden) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


class StoredTensor(Protocol):
    """`type`: GGUF type of the blocks in which the tensor may stay in memory; None: it must be expanded."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> GGMLType | None: ...

    @property
    def format_name(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...


def group_format(info: StoredTensor) -> GroupFormat | None:
    """Return the group format in which a tensor may stay in memory; None: it cannot stay in groups."""
    if isinstance(info, QuantisedLayer):
        return info.group_format
    return None if info.type is None else GROUP_FORMATS.get(info.type.name)


def has_order(info: StoredTensor) -> bool:
    """Return True if a tensor's inputs are reordered in memory."""
    return isinstance(info, QuantisedLayer) and info.has_order()


def stored_tensors(files: ModelFiles) -> Mapping[str, StoredTensor]:
    """Return the tensors by Hugging Face's names; {} for an unquantised checkpoint. Raises StartupError."""
    return gguf_tensors(files) if files.load_format == "gguf" else read_quantised_layers(files, log=True)


def _iter_torch_file(
    path: Path, *, advance: Callable[[int], None], is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a `.bin` file: `weights_only`, so that a file cannot run code; memory-mapped if possible.

    Pages of a mapped file count as resident memory, but they belong to the file cache, and the kernel can reclaim them.
    """
    state = _load(path)
    for name in list(state):
        tensor = state.pop(name)
        if not isinstance(tensor, Tensor):
            raise StartupError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor.")
        advance(tensor.nbytes)
        if is_wanted(name):
            yield name, tensor
        del tensor


def _load(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TypedStorage warnings for files of old versions
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StartupError(f"{path}: cannot be read as PyTorch weights: {reason}") from error
    if not isinstance(state, dict):
        raise StartupError(f"{path}: holds a {type(state).__name__}, not a dictionary of tensors.")
    return state
