"""Local models: locates a mounted volume claim, and copies a local model into another folder.

`pvc://CLAIM/PATH` is a path in the folder where the claim is mounted: $OCTAVO_CLAIMS/CLAIM (default: /models/CLAIM).
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from octavo_engine.sources.download_dir import Snapshot
from octavo_engine.sources.file_selection import FileSelection, select_files
from octavo_engine.sources.weight_choice import with_shards
from octavo_engine.wire.errors import StartupError

CLAIM_SCHEME = "pvc://"
CLAIMS_VARIABLE, CLAIMS_PATH = "OCTAVO_CLAIMS", "/models"
_DIGEST_CHARS = 12


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
            version=hashlib.sha256(listing.encode()).hexdigest()[:_DIGEST_CHARS],
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
