"""`ModelSource`: the interface to a place from which `fetch_into` downloads a model."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from octavo_engine.sources.disk_space import check_disk_space
from octavo_engine.sources.download_dir import (
    STAGING,
    Snapshot,
    check_unclaimed,
    lock_folder,
    missing_files,
    move_into_place,
    prepare_staging,
    read_complete_snapshot,
)
from octavo_engine.sources.progress import Advance, folder_bytes, ignore_progress, show_progress, size_text
from octavo_engine.sources.retries import Unreachable

logger = logging.getLogger(__name__)


class ModelSource(Protocol):
    """A source of models. It raises StartupError; if that is Unreachable, an earlier complete download may be used."""

    uri: str

    def snapshot(self) -> Snapshot: ...

    def download(self, files: Mapping[str, int], snapshot: Snapshot, staging: Path) -> None:
        """Download `files` of `snapshot` to `staging`, each under its name; resume incomplete files there."""
        ...


def fetch_into(folder: Path, source: ModelSource, advance: Advance = ignore_progress) -> Path:
    """Download a model into a folder; return the folder, or the model's file in it, when it is complete."""
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
