"""Reads the tensors of a `.bin` checkpoint: `weights_only`, so that a file cannot run code; memory-mapped if possible.

Pages of a mapped file count as resident memory, but they belong to the file cache, and the kernel can reclaim them.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from octavo_engine.wire.errors import StartupError


def iter_torch_file(path: Path, *, advance: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    state = _load(path)
    for name in list(state):
        tensor = state.pop(name)
        if not isinstance(tensor, Tensor):
            raise StartupError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor.")
        advance(tensor.nbytes)
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
