"""A folder that holds one fetched model: how it is filled so that nobody ever takes half a model for a whole one.

Files arrive in a folder within it, and are renamed into place when all are there, `config.json` as the last: without
it a folder isn't served. Then comes the marker, which says what lies here; a folder with marker and every file in its
full size is complete, and a second fetch changes nothing. Fetching goes on from what an earlier one left.

One process at a time fills a folder. The lock is the kernel's (flock): it ends with its process, however that ends. On
a volume without locks two may fetch at once; each writes what the other writes, and both end well.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)

MARKER, STAGING, LOCK = ".octavo-fetched.json", ".octavo-partial", ".octavo-fetch.lock"
#: What a fresh volume may hold.
_ALLOWED_NAMES = ("lost+found",)
LAST = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is to lie in a folder. `version` changes with the snapshot: a commit, a digest of a listing."""

    uri: str
    version: str
    files: Mapping[str, int] = field(default_factory=dict)  # name -> bytes
    main: str | None = None  # the file that is the model, if not the folder

    def path_in(self, folder: Path) -> Path:
        return folder if self.main is None else folder / self.main


def read_complete_snapshot(folder: Path) -> Snapshot | None:
    """What lies here in full, if anything does."""
    try:
        snapshot = Snapshot(**json.loads((folder / MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return snapshot if all(_num_bytes(folder / name) == size for name, size in snapshot.files.items()) else None


def check_unclaimed(folder: Path, uri: str) -> None:
    """Raises StartupError for a folder with something else in it: nobody's files are overwritten."""
    held = _recorded_uri(folder)
    if held == uri or not folder.exists():
        return
    if held is not None and (folder / MARKER).exists():
        raise StartupError(f"{folder}: holds {held}, not {uri}: name another folder, or remove this one.")
    if not folder.is_dir():
        raise StartupError(f"{folder}: is a file: name a folder to fetch {uri} into.")
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others := [name for name in names if name not in _ALLOWED_NAMES]:
        raise StartupError(
            f"{folder}: holds {', '.join(others[:3])}{' …' if len(others) > 3 else ''}, which octavo didn't fetch: "
            f"name an empty folder for {uri}."
        )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """While one fills the folder, the others wait here. Raises StartupError where the folder can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / LOCK).open("w")
    except OSError as error:
        raise StartupError(f"{folder}: can't be written: {error.strerror or error}.") from error
    with held:  # closing it lets go
        _lock(held, folder)
        yield


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("%s: another process fetches into it: waiting for it to end", folder)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning("%s: no locks on this volume (%s): others may fetch the same", folder, error.strerror)


def prepare_staging(folder: Path, snapshot: Snapshot) -> Path:
    """Where its files are to arrive. What an earlier fetch left there stays if it is of the same version."""
    staging = folder / STAGING
    if staging.exists() and _read_marker(staging) != asdict(snapshot):
        shutil.rmtree(staging)
    staging.mkdir(exist_ok=True)
    (staging / MARKER).write_text(json.dumps(asdict(snapshot)))
    return staging


def move_into_place(folder: Path, snapshot: Snapshot) -> None:
    """From the staging folder into place. Files of an earlier version that this one hasn't go."""
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
    """Those that are neither in place, as the same version's, nor prepare_staging in full."""
    in_place = _read_marker(folder).get("version") == snapshot.version

    def is_there(name: str, size: int) -> bool:
        return _num_bytes(folder / STAGING / name) == size or (in_place and _num_bytes(folder / name) == size)

    return {name: size for name, size in snapshot.files.items() if not is_there(name, size)}


def _recorded_uri(folder: Path) -> str | None:
    """Also of one whose files were being put in place when something ended it."""
    uri = _read_marker(folder).get("uri") or _read_marker(folder / STAGING).get("uri")
    return uri if isinstance(uri, str) else None


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _num_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
