"""The LoRA adapters that a runner holds, by the hashes of their contents, and their terms in a step.

The rows of an adapter follow each other in a step (`sort_by_adapter`), so its terms read and write slices. Only steps
with such rows set `Linear.adapter`: other steps keep their fused gate and their recordings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from octavo_engine.layers.linear import Linear
from octavo_engine.models.model import Model
from octavo_engine.runner.lora_terms import LayerTerm, Terms, content_hash, make_terms, read_tensors
from octavo_engine.settings.lora import check_num_adapters
from octavo_engine.sources.adapter import AdapterFiles, read_adapter
from octavo_engine.sources.progress import Advance, ignore_progress, read_unless_stalled
from octavo_engine.sources.resolve import locate_adapter
from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    folder: Path
    terms: Terms


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter that was read for a model, and is not added yet. `hash`: of its content."""

    hash: str
    loaded: LoadedAdapter
    model: Model
    files: AdapterFiles
    tensors: Mapping[str, Tensor]


class Adapters:
    """The adapters of a model. While the model's weights are released, only the folders of its adapters stay."""

    def __init__(self, model: Model, *, max_loras: int, max_rank: int, download_dir: Path | None = None) -> None:
        self._model: Model | None = model
        self._max_loras, self._max_rank = max_loras, max_rank
        self._download_dir = download_dir
        self._loaded: dict[str, LoadedAdapter] = {}

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._loaded

    def load(self, location: str) -> str:
        """Read, pack and add an adapter; return its hash. If it raises StartupError, nothing has changed."""
        return self.add(self.prepare(location))

    def prepare(self, location: str, advance: Advance = ignore_progress) -> PreparedAdapter:
        """Download, read and pack an adapter, on any thread. Raises StartupError.

        A thread that hangs in the source keeps no model in memory.
        """
        if self._model is None:
            raise StartupError(f"adapter {location}: the engine sleeps: wake it up first.")
        files = read_adapter(locate_adapter(location, self._download_dir, advance), advance)
        tensors = read_tensors(files, advance)
        return self.pack(files, tensors, content_hash(files, tensors))

    def pack(self, files: AdapterFiles, tensors: Mapping[str, Tensor], adapter: str) -> PreparedAdapter:
        """Pack an adapter that was read, and whose hash is `adapter`, on any thread. Raises StartupError."""
        model = self._model
        if model is None:
            raise files.error("the engine sleeps: wake it up first.")
        terms = make_terms(files, tensors, model, max_rank=self._max_rank)
        return PreparedAdapter(adapter, LoadedAdapter(files.folder, terms), model, files, tensors)

    def add(self, prepared: PreparedAdapter) -> str:
        """Add an adapter, between two steps; return its hash. If it raises StartupError, nothing has changed."""
        if prepared.model is not self._model:
            raise prepared.files.error("the engine slept while it was read: load it again.")
        check_num_adapters(len(self._loaded.keys() | {prepared.hash}), self._max_loras)
        self._loaded[prepared.hash] = prepared.loaded
        return prepared.hash

    def remove(self, adapter: str) -> None:
        """Free the memory of an adapter, if it is loaded, between two steps."""
        self._loaded.pop(adapter, None)

    def release(self) -> None:
        """Free the memory, with that of the model."""
        self._model = None
        self._loaded = {adapter: replace(loaded, terms={}) for adapter, loaded in self._loaded.items()}

    def reload(self, reload_model: Callable[[], Model]) -> Model:
        """Read all adapters, then load the model again. Raises StartupError if an adapter stalls or has changed."""
        read = {adapter: _read_again(adapter, loaded.folder) for adapter, loaded in self._loaded.items()}
        model, reloaded = reload_model(), {}
        for adapter, (files, tensors) in read.items():
            terms = make_terms(files, tensors, model, max_rank=self._max_rank)
            reloaded[adapter] = LoadedAdapter(files.folder, terms)
        self._model, self._loaded = model, reloaded
        return model

    @contextmanager
    def applied(self, rows: Mapping[str, slice]) -> Iterator[None]:
        """Add the terms of adapters to their rows of a forward pass."""
        terms: dict[Linear, list[tuple[slice, LayerTerm]]] = {}
        for adapter, span in rows.items():
            for linear, term in self._loaded[adapter].terms.items():
                terms.setdefault(linear, []).append((span, term))
        for linear, found in terms.items():
            linear.adapter = partial(_add_terms, found)
        try:
            yield
        finally:
            for linear in terms:
                linear.adapter = None


def _read_again(adapter: str, folder: Path) -> tuple[AdapterFiles, dict[str, Tensor]]:
    """Read an adapter, whose hash is `adapter`. Raises StartupError if its source stalls or its content has changed."""

    def read(advance: Advance) -> tuple[AdapterFiles, dict[str, Tensor]]:
        files = read_adapter(folder, advance)
        return files, read_tensors(files, advance)

    files, tensors = read_unless_stalled(f"adapter {folder}", read)
    if content_hash(files, tensors) != adapter:
        raise files.error("it has changed since it was loaded: restart the engine.")
    return files, tensors


def _add_terms(terms: Sequence[tuple[slice, LayerTerm]], x: Tensor, parts: tuple[Tensor, ...]) -> None:
    for rows, term in terms:
        term.add(x[rows], [part[rows] for part in parts])
