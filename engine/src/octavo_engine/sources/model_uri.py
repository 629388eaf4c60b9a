"""Parses a model's name: a path on this machine, a repository on a hub, or a folder in a bucket.

A name has one of the forms `org/name`, `hf://org/name[/file-or-glob]`, `org/name:Q4_K_M`, `ms://org/name`,
`s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` (or `azure://`), `file://path`, `pvc://claim/path`,
`pkg://NAME[/path-or-glob]`, and a path. Names without a scheme are on ModelScope if VLLM_USE_MODELSCOPE or
OCTAVO_USE_MODELSCOPE is set.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from octavo_engine.sources.local import CLAIM_SCHEME, locate_in_claim
from octavo_engine.sources.package import SCHEME as PACKAGE_SCHEME
from octavo_engine.sources.package import locate_in_package
from octavo_engine.wire.errors import StartupError

WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin")
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
_SLUG_CHARS, _DIGEST_CHARS = 80, 10


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
