"""The LoRA adapters that a runner holds, by the hashes of their contents, and their terms in a step.

In a step, the rows of each adapter are adjacent (`sort_by_adapter`), so the terms of an adapter read and write slices.
`Linear.adapter` is set only for steps with adapters: other steps keep fused gates and recordings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from octavo_engine.layers.linear import Linear
from octavo_engine.models.model import Model
from octavo_engine.runner.lora_terms import LayerTerm, Terms, content_hash, make_terms, read_tensors
from octavo_engine.sources.adapter import AdapterFiles, read_adapter
from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.sources.resolve import locate_adapter
from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter that was read and packed for a model, but not added yet. `hash`: hash of its content."""

    hash: str
    terms: Terms
    model: Model
    files: AdapterFiles
    tensors: Mapping[str, Tensor]

    @property
    def folder(self) -> Path:
        return self.files.folder


class Adapters:
    """The adapters that are in memory for a model. The engine core chooses them; they are the same on all ranks."""

    def __init__(self, model: Model, *, max_rank: int, download_dir: Path | None = None) -> None:
        self._model: Model | None = model
        self._max_rank, self._download_dir = max_rank, download_dir
        self._terms: dict[str, Terms] = {}

    def load(self, location: str) -> str:
        """Read, pack and add an adapter; return its hash. If it raises StartupError, nothing has changed."""
        prepared = self.prepare(location)
        self.add(prepared)
        return prepared.hash

    def prepare(self, location: str, advance: Advance = ignore_progress) -> PreparedAdapter:
        """Download, read and pack an adapter, on any thread. Raises StartupError.

        A thread that hangs in a download holds no reference to the model.
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
        return PreparedAdapter(adapter, terms, model, files, tensors)

    def add(self, prepared: PreparedAdapter) -> None:
        """Add an adapter, between two steps. If it raises StartupError, nothing has changed."""
        if prepared.model is not self._model:
            raise prepared.files.error("the engine slept while it was read: load it again.")
        self._terms[prepared.hash] = prepared.terms

    def remove(self, adapter: str) -> None:
        """Free the memory of an adapter, if it is there, between two steps."""
        self._terms.pop(adapter, None)

    def release(self) -> None:
        """Free the memory of all adapters, as the model's is freed."""
        self._model = None
        self._terms.clear()

    def reload(self, reload_model: Callable[[], Model]) -> Model:
        """Load the model again. The engine core adds the adapters that requests need."""
        self._model = reload_model()
        return self._model

    @contextmanager
    def applied(self, rows: Mapping[str, slice]) -> Iterator[None]:
        """Add the terms of adapters to their rows of a forward pass."""
        terms: dict[Linear, list[tuple[slice, LayerTerm]]] = {}
        for adapter, span in rows.items():
            for linear, term in self._terms[adapter].items():
                terms.setdefault(linear, []).append((span, term))
        for linear, found in terms.items():
            linear.adapter = partial(_add_terms, found)
        try:
            yield
        finally:
            for linear in terms:
                linear.adapter = None


def _add_terms(terms: Sequence[tuple[slice, LayerTerm]], x: Tensor, parts: tuple[Tensor, ...]) -> None:
    for rows, term in terms:
        term.add(x[rows], [part[rows] for part in parts])
