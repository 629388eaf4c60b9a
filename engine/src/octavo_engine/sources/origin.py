"""`Origin`: where a model can be fetched from, as `fetch_into` sees it: say what is there, then bring it."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from octavo_engine.sources.deposit import (
    STAGING,
    Content,
    check_free_for,
    complete_content,
    filled_alone,
    missing_files,
    settle,
    staged,
)
from octavo_engine.sources.progress import folder_bytes, shown_progress, size_text
from octavo_engine.sources.retries import Unreachable
from octavo_engine.sources.room import check_room

logger = logging.getLogger(__name__)


class Origin(Protocol):
    """Errors are StartupError; Unreachable is one that what was fetched before may make up for."""

    uri: str

    def content(self) -> Content: ...

    def bring(self, files: Mapping[str, int], content: Content, staging: Path) -> None:
        """`files` of `content`, each under its name, going on from what lies in `staging`."""
        ...


def fetch_into(folder: Path, origin: Origin) -> Path:
    """The folder, or the file in it, once all of the model is there."""
    try:
        content = origin.content()
    except Unreachable as error:
        if (kept := complete_content(folder)) is None or kept.uri != origin.uri:
            raise
        logger.warning("%s; what was fetched before is used, version %s", error, kept.version)
        return kept.path_in(folder)
    if complete_content(folder) == content:
        logger.info("%s: already in %s, version %s", origin.uri, folder, content.version)
        return content.path_in(folder)
    check_free_for(folder, origin.uri)
    with filled_alone(folder):
        if complete_content(folder) != content:
            _fill(folder, origin, content)
    return content.path_in(folder)


def _fill(folder: Path, origin: Origin, content: Content) -> None:
    staging = staged(folder, content)
    missing = missing_files(folder, content)
    needed = max(0, sum(missing.values()) - folder_bytes(staging))
    check_room(origin.uri, folder, needed_bytes=needed, num_files=len(missing))
    logger.info("%s: fetching %d files, %s, into %s", origin.uri, len(missing), size_text(needed), folder)
    with shown_progress(origin.uri, folder / STAGING, needed):
        origin.bring(missing, content, staging)
    settle(folder, content)
