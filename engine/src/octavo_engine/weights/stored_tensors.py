"""`stored_tensors`: the tensors of a checkpoint that are quantised, or may be, by its headers alone."""

from collections.abc import Mapping
from typing import Protocol

from octavo_engine.sources.gguf_types import GGMLType
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.weights.gguf_file import gguf_tensors
from octavo_engine.weights.loader import read_packed_layers


class StoredTensor(Protocol):
    """`type`: of the blocks in which the tensor may stay in memory. `num_bytes`: in the file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> GGMLType: ...

    @property
    def num_bytes(self) -> int: ...


def stored_tensors(files: ModelFiles) -> Mapping[str, StoredTensor]:
    """Return the tensors by Hugging Face's names; {} for an unquantised checkpoint. Raises StartupError."""
    return gguf_tensors(files) if files.load_format == "gguf" else read_packed_layers(files, log=True)
