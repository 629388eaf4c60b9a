"""Fills a folder with one downloaded model, so that an incomplete model is never used as a complete one.

Files are downloaded to a staging folder inside the folder and, when all are complete, renamed into place, `config.json`
last: without it the folder is not served. Then a marker file is written, which describes the content; a folder with the
marker and all files in full size is complete, and a second fetch changes nothing. A fetch resumes incomplete files.

One process at a time fills a folder. The lock is the kernel's (flock) and ends with its process. On a volume without
locks two processes may fetch at once; both write the same bytes, and both succeed.
"""

import fcntl
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from octavo_engine.sources.progress import (
    Advance,
    folder_bytes,
    ignore_progress,
    show_progress,
    size_text,
)
from octavo_engine.sources.retries import Unreachable
from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)

MARKER, STAGING, LOCK = ".octavo-fetched.json", ".octavo-partial", ".octavo-fetch.lock"
#: Names that a new volume may contain.
_ALLOWED_NAMES = ("lost+found",)
LAST = "config.json"
LOCK_PERIOD_S = 0.2
#: Schemes of sources with versions; local files have only modification times.
_REMOTE = ("hf", "ms", "s3", "gs", "az", "azure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The intended content of a folder. `version` changes with the content: a commit, or a digest of a listing."""

    uri: str
    version: str
    files: Mapping[str, int] = field(default_factory=dict)  # name -> bytes
    main: str | None = None  # the file that is the model; None: the folder is the model

    def path_in(self, folder: Path) -> Path:
        return folder if self.main is None else folder / self.main


def read_complete_snapshot(folder: Path) -> Snapshot | None:
    """Return the snapshot in the folder's marker; None without a marker, or if a file is missing or incomplete."""
    try:
        snapshot = Snapshot(**json.loads((folder / MARKER).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return snapshot if all(_num_bytes(folder / name) == size for name, size in snapshot.files.items()) else None


def check_unclaimed(folder: Path, uri: str) -> None:
    """Raise StartupError if the folder holds other files or another model, so that they are not overwritten."""
    held = _recorded_uri(folder)
    if held == uri or not folder.exists():
        return
    if held is not None and (folder / MARKER).exists():
        raise StartupError(f"{folder}: holds {held}, not {uri}: choose another folder, or remove this one.")
    if not folder.is_dir():
        raise StartupError(f"{folder}: is a file: choose a folder to fetch {uri} into.")
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others := [name for name in names if name not in _ALLOWED_NAMES]:
        raise StartupError(
            f"{folder}: holds {', '.join(others[:3])}{' …' if len(others) > 3 else ''}, which octavo did not fetch: "
            f"choose an empty folder for {uri}."
        )


@contextmanager
def lock_folder(folder: Path, advance: Advance = ignore_progress) -> Iterator[None]:
    """Create the folder and hold its lock within the context; wait while another process or thread holds it.

    `advance` counts the bytes that arrive meanwhile. Raises StartupError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / LOCK).open("w")
    except OSError as error:
        raise StartupError(f"{folder}: cannot be written: {error.strerror or error}.") from error
    with held:  # closing the file releases the lock
        size = 0
        while not _try_lock(held, folder):
            if not size:
                logger.info("%s: waiting for another process that fetches into this folder", folder)
            before, size = size, folder_bytes(folder)
            advance(abs(size - before))
            time.sleep(LOCK_PERIOD_S)
        yield


def _try_lock(file: IO[str], folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "%s: this volume has no locks (%s): other processes may fetch the same files", folder, error.strerror
        )
    return True


def prepare_staging(folder: Path, snapshot: Snapshot) -> Path:
    """Create and return the staging folder. Files of an earlier fetch are kept if they are of the same version."""
    staging = folder / STAGING
    if staging.exists() and _read_marker(staging) != asdict(snapshot):
        shutil.rmtree(staging)
    staging.mkdir(exist_ok=True)
    (staging / MARKER).write_text(json.dumps(asdict(snapshot)))
    return staging


def move_into_place(folder: Path, snapshot: Snapshot) -> None:
    """Move files from the staging folder into place and delete files that only an earlier version had."""
    staging, before = folder / STAGING, _read_marker(folder)
    (folder / MARKER).unlink(missing_ok=True)
    for name in sorted(snapshot.files, key=lambda name: Path(name).name == LAST):
        if (staging / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(folder / name)
    for name in set(before.get("files", ())) - set(snapshot.files):
        (folder / name).unlink(missing_ok=True)
    (staging / MARKER).replace(folder / MARKER)
    shutil.rmtree(staging, ignore_errors=True)


def missing_files(folder: Path, snapshot: Snapshot) -> dict[str, int]:
    """Return the files that are neither in place, with the same version, nor complete in the staging folder."""
    in_place = _read_marker(folder).get("version") == snapshot.version

    def is_there(name: str, size: int) -> bool:
        return _num_bytes(folder / STAGING / name) == size or (in_place and _num_bytes(folder / name) == size)

    return {name: size for name, size in snapshot.files.items() if not is_there(name, size)}


def _recorded_uri(folder: Path) -> str | None:
    """Return the URI in the folder's marker or, if a move into place was interrupted, in that of its staging folder."""
    uri = _read_marker(folder).get("uri") or _read_marker(folder / STAGING).get("uri")
    return uri if isinstance(uri, str) else None


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _num_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def fetched_revision(folder: Path) -> str:
    """Return the version of the files in a folder; empty for local files, which have no version.

    The Hugging Face cache has a folder per commit (`models--ORG--NAME/snapshots/COMMIT`). In other folders, this
    package writes a marker file after a download.
    """
    for place in (folder, *folder.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
            return place.name
    snapshot = read_complete_snapshot(folder)
    return "" if snapshot is None or snapshot.uri.partition("://")[0] not in _REMOTE else snapshot.version


class ModelSource(Protocol):
    """A place from which `fetch_into` downloads a model.

    It raises StartupError; if that is Unreachable, an earlier complete download may be used.
    """

    uri: str

    def snapshot(self) -> Snapshot: ...

    def download(self, files: Mapping[str, int], snapshot: Snapshot, staging: Path) -> None:
        """Download `files` of `snapshot` to `staging`, each under its name; resume incomplete files there."""
        ...


def fetch_into(folder: Path, source: ModelSource, advance: Advance = ignore_progress) -> Path:
    """Download a model into a folder. Once it is complete, return the folder, or the model's single file in it."""
    try:
        snapshot = source.snapshot()
    except Unreachable as error:
        if (kept := read_complete_snapshot(folder)) is None or kept.uri != source.uri:
            raise
        logger.warning("%s; version %s, which was fetched before, is used", error, kept.version)
        return kept.path_in(folder)
    if read_complete_snapshot(folder) == snapshot:
        logger.info("%s: already in %s, version %s", source.uri, folder, snapshot.version)
        return snapshot.path_in(folder)
    check_unclaimed(folder, source.uri)
    with lock_folder(folder, advance):
        if read_complete_snapshot(folder) != snapshot:
            _fill(folder, source, snapshot, advance)
    return snapshot.path_in(folder)


def _fill(folder: Path, source: ModelSource, snapshot: Snapshot, advance: Advance) -> None:
    staging = prepare_staging(folder, snapshot)
    missing = missing_files(folder, snapshot)
    needed = max(0, sum(missing.values()) - folder_bytes(staging))
    check_disk_space(source.uri, folder, needed_bytes=needed, num_files=len(missing))
    logger.info("%s: fetching %d files, %s, into %s", source.uri, len(missing), size_text(needed), folder)
    with show_progress(source.uri, folder / STAGING, needed, advance=advance):
        source.download(missing, snapshot, staging)
    move_into_place(folder, snapshot)


def check_disk_space(name: str, folder: Path, *, needed_bytes: int, num_files: int) -> None:
    """Raise StartupError if `needed_bytes` exceed the free space. `folder` need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise StartupError(
            f"{name}: {num_files} files of {size_text(needed_bytes)} remain to be fetched into {folder}, where "
            f"{size_text(free)} are free: {size_text(needed_bytes - free)} too little. Free disk space, or choose a "
            "larger volume (on Kubernetes: spec.model.cache)."
        )
