"""Selects a remote model's files to download: weights in one format, and configuration files.

It works on file names. Repositories hold several formats and a GGUF file per quantisation: only the selected files are
downloaded, and if the selection is ambiguous, the error lists the choices.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from octavo_engine.sources.weight_choice import ORDER
from octavo_engine.wire.errors import StartupError

_METADATA = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = {"safetensors": ("*.safetensors",), "pt": ("pytorch_model*.bin",)}
_IGNORED = ("*/*", "consolidated*", "adapter*", "training_args*", "optimizer*", ".*")
#: Files in folders: settings of sentence-transformers, named chat templates.
_IN_FOLDERS = re.compile(r"(\d_Pooling/config\.json|additional_chat_templates/[^/]+\.jinja)$")
#: Value in place of a load format: select an adapter's two files.
ADAPTER = "adapter"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_SHARD = re.compile(r"-\d{5}-of-(?=\d{5}\.\w+$)")
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class FileSelection:
    """The selected names. `main`: the GGUF file (the first shard) selected by name; None: the folder is the model."""

    names: tuple[str, ...]
    main: str | None = None


def select_files(uri: str, names: Iterable[str], *, load_format: str, file: str | None = None) -> FileSelection:
    """Select files. `file`: a name or glob of one GGUF model. Raises StartupError if none or several match."""
    known = sorted(names)
    if load_format == ADAPTER:
        return _adapter(uri, known)
    if file is not None:
        shards = _named_gguf(uri, known, file)
        return FileSelection(tuple(shards), main=shards[0])
    metadata = _matching(known, _METADATA)
    if load_format == "dummy":
        return FileSelection(tuple(metadata))
    for candidate in ORDER if load_format == "auto" else (load_format,):
        weights = _lone_gguf(uri, known) if candidate == "gguf" else _matching(known, _WEIGHTS[candidate])
        if weights:
            return FileSelection((*metadata, *weights))
    wanted = "weights (*.safetensors, pytorch_model*.bin or *.gguf)" if load_format == "auto" else "weights"
    suffix = "" if load_format == "auto" else f" in the format {load_format}"
    raise StartupError(f"{uri}: found no {wanted}{suffix}.")


def _adapter(uri: str, names: Sequence[str]) -> FileSelection:
    if missing := [name for name in ADAPTER_FILES if name not in names]:
        raise StartupError(f"{uri}: found no {missing[0]}: give the location of an adapter that peft has saved.")
    return FileSelection(ADAPTER_FILES)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    kept = (name for name in names if _IN_FOLDERS.match(name) or not any(fnmatch(name, p) for p in _IGNORED))
    return [name for name in kept if any(fnmatch(name, pattern) for pattern in patterns)]


def _lone_gguf(uri: str, names: Sequence[str]) -> list[str]:
    """Return the files of the only GGUF model. Raises StartupError for several, which may have hundreds of GB."""
    sets = _sets(name for name in names if name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj"))
    if len(sets) > 1:
        shown = ", ".join([first for first, *_ in sets.values()][:_MOST_NAMED])
        raise StartupError(f"{uri}: there are several GGUF files: choose one as {uri}/FILE: {shown}.")
    return next(iter(sets.values()), [])


def _named_gguf(uri: str, names: Sequence[str], file: str) -> list[str]:
    sets = _sets(name for name in names if name.endswith(".gguf"))
    chosen = [files for files in sets.values() if any(fnmatch(name, file) for name in files)]
    if not chosen:
        raise StartupError(f"{uri}: no GGUF file matches {file!r}.")
    if len(chosen) > 1:
        shown = ", ".join(first for first, *_ in chosen)
        raise StartupError(f"{uri}: {file!r} matches several GGUF files: choose one of {shown}.")
    return chosen[0]


def _sets(ggufs: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of GGUF files by model: each value lists the shards of one model, in order."""
    sets: dict[str, list[str]] = {}
    for name in ggufs:
        sets.setdefault(_SHARD.sub("-of-", name), []).append(name)
    return sets
